"""Checkpoints of text and images, trained on text: the losses of plain PEFT, and an adapter for the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.multimodal import MULTIMODAL, make_multimodal
from tests.plain_peft import plain_losses
from tests.saved_adapters import save_adapter
from tests.tiny import write_chats
from trainer.config import LoraSection, ModelSection, RunConfig, UserError, load_config
from trainer.data.samples import Samples
from trainer.memory.planner import Planner
from trainer.memory.preflight import plan_memory
from trainer.model.adapter import GradientCheck, summarize_adapted_layers
from trainer.model.base import build_empty_model, load_model_config
from trainer.model.targets import check_targets
from trainer.parallel.engine.optimizer import build_optimizer, build_schedule
from trainer.parallel.ranks.group import Ranks
from trainer.patches.packing_probe import check_causal, separate_documents
from trainer.setup.build import Builder
from trainer.setup.preflight import prepare
from trainer.tasks.language import LanguageTask

CPU = torch.device("cpu")
# What is not the language model, by hand.
TOWERS = {
    "gemma3": r"model\.(vision_tower|multi_modal_projector)\..*",
    "gemma4": r"model\.(vision_tower|embed_vision)\..*",
    "qwen3_vl": r"model\.visual\..*",
    "qwen3_5": r"model\.visual\..*",
    "mistral3": r"model\.(vision_tower|multi_modal_projector)\..*",
    "llama4": r"(vision_model|multi_modal_projector)\..*|.*\.router",
}
# The others have seven linear ones in each; one in two of Llama 4 has experts as well.
TEXT_LAYERS = {"gemma4": 4 * 7 + 2 * 2 + 1, "qwen3_5": 4 * 3 + 3 * 5 + 4, "llama4": 4 * 7 + 2 * 2}
RELATIVE = 1e-6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("multimodal")
    write_chats(root / "chats.jsonl", 24)
    for name in MULTIMODAL:
        make_multimodal(root / name, name)
    return root


def run_config(root: Path, name: str, **changes: Any) -> RunConfig:
    settings = {
        "base_model": str(root / name),
        "output_dir": str(root / "out"),
        "lora": {"r": 4, **changes.get("lora", {})},
        "dataset": {
            "path": str(root / "chats.jsonl"),
            "max_length": 64,
            "cache_dir": str(root / "cache"),
            "packing": changes.get("packing", False),
        },
        "training": {"max_steps": 3, "batch_size": 2, "learning_rate": 1e-2, "precision": "fp32"},
        "ops": {"backend": "reference"},
    }
    (root / "run.yaml").write_text(yaml.safe_dump(settings))
    return load_config(root / "run.yaml", []).config


def train(config: RunConfig) -> tuple[Any, list[str], list[float]]:
    """The model that trainer.setup.build makes, its lines, and its losses in a loop without DeepSpeed."""
    prepared, ranks, training = prepare(config), Ranks(0, 1, 0), config.training
    decided = plan_memory(Planner, config, prepared, ranks, CPU, "fp32").decisions
    task = LanguageTask(config, prepared, ranks, CPU, "fp32", print)
    model, lines = Builder(config, decided, task, ranks, CPU, "fp32").build_model()
    token_loss, pad = task.build_loss(model, fused_head=decided.fused_head.value), prepared.tokenizer.pad_token_id
    check_causal(token_loss, model, pad, CPU, config.base_model)
    task.flat_packs = config.dataset.packing and separate_documents(token_loss, model, pad, CPU)
    batches = task.build_batches()
    optimizer = build_optimizer(model, training, config.lora, fused=False)
    assert training.max_steps is not None and isinstance(prepared.data.train, Samples)
    schedule = build_schedule(optimizer, training, training.max_steps)
    model.train()
    losses: list[float] = []
    check: GradientCheck | None = GradientCheck(model)
    epoch = offset = 0
    for _ in range(training.max_steps):
        parts, taken = batches.build_step_batches(epoch, offset)
        targets, total = sum(part.target_count for part in parts), 0.0
        for part in parts:
            loss = token_loss(model, part, CPU)
            (loss / targets).backward()
            total += float(loss.detach())
        if check is not None:
            check.finish()
            check = None
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total / targets)
        offset += taken
        if offset >= len(prepared.data.train):
            epoch, offset = epoch + 1, 0
    return model, [line for line in lines if isinstance(line, str)], losses


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_trains_as_in_plain_peft_and_the_adapter_loads_onto_the_whole_model(
    name: str, root: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    config = run_config(root, name)
    model, lines, losses = train(config)
    assert losses == pytest.approx(
        plain_losses(config, ranks=1, attention=None, device=CPU, excluded=TOWERS[name]), rel=RELATIVE
    )
    assert len({round(loss, 4) for loss in losses}) == 3, "nothing was learned that could differ"
    assert sum(layer.count for layer in summarize_adapted_layers(model)) == TEXT_LAYERS.get(name, 4 * 7)
    [line] = [line for line in lines if "receives no text" in line]
    assert line.startswith("without adapter: ") and "vis" in line
    save_adapter(model, tmp_path)
    base = AutoModelForMultimodalLM.from_pretrained(root / name, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
        with loaded.disable_adapter():
            assert float((loaded(input_ids=ids).logits - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", MULTIMODAL)
def test_packed_documents_stay_apart(name: str, root: Path) -> None:
    config = run_config(root, name, packing=True)
    expected = plain_losses(config, ranks=1, attention=None, device=CPU, excluded=TOWERS[name])
    assert train(config)[2] == pytest.approx(expected, rel=RELATIVE)


def test_excludes_and_lists_of_targets_work_beside_what_is_left_out(root: Path) -> None:
    lora = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0", "vision_tower"]}
    model, *_ = train(run_config(root, "gemma3", lora=lora))
    assert {(layer.name, layer.count) for layer in summarize_adapted_layers(model)} == {("q_proj", 3), ("v_proj", 3)}


def test_a_name_that_is_only_beyond_the_language_model_is_refused(root: Path) -> None:
    model = build_empty_model(load_model_config(str(root / "llama4"), ModelSection()), ModelSection())
    with pytest.raises(UserError, match=r"lora.target_modules=fc1: is outside the language model"):
        check_targets(model, LoraSection(target_modules=("q_proj", "fc1")))
    with pytest.raises(UserError, match=r"lora.exclude_modules=mlp: matches no module"):
        check_targets(model, LoraSection(exclude_modules=("mlp",)))  # of text it is called feed_forward
    check_targets(model, LoraSection(exclude_modules=("vision_model", "feed_forward")))
