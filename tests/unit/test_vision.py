"""Conversations with images: the losses of transformers and PEFT, the data, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.plain_peft import train_steps, with_adapter
from tests.unit.test_multimodal import train
from tests.vision import make_vision_model, write_vision_chats
from trainer.config import RunConfig, load_config
from trainer.data.image_files import decode_image
from trainer.data.image_parts import read_stored
from trainer.data.samples import Sample, split_documents
from trainer.model.base import load_base_model
from trainer.model.vision import FAMILIES
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

CPU = torch.device("cpu")
TOWERS = r"model\.(visual|vision_tower|multi_modal_projector)\..*"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    write_vision_chats(root, 16)
    for family in FAMILIES:
        (root / family).mkdir()
        make_vision_model(root / family, family)
    return root


def run_config(root: Path, family: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "base_model": str(root / family),
        "output_dir": str(root / "out"),
        "lora": {"r": 4},
        "dataset": {"path": str(root / "chats.jsonl"), "max_length": 192, "cache_dir": str(root / "cache")},
        "training": {"max_steps": 3, "batch_size": 3, "learning_rate": 1e-2, "precision": "fp32"},
        "ops": {"backend": "reference"},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            settings.setdefault(section, {})[key] = value
        else:
            settings[section] = value
    (root / "run.yaml").write_text(yaml.safe_dump(settings))
    return load_config(root / "run.yaml", []).config


def plain_vision_losses(config: RunConfig) -> list[float]:
    """Loss of each step by transformers and PEFT, document by document, with inputs of the model's own processor."""
    prepared = prepare(config)
    model = load_base_model(config.base_model, config.model, dtype=torch.float32, device=CPU, attention="sdpa")
    set_seed(config.seed)
    model, losses = with_adapter(model, config, TOWERS, []), list[float]()
    model.train()
    groups = [{"params": [each for each in model.parameters() if each.requires_grad]}]
    for samples in train_steps(groups, config, prepared):
        documents = [document for sample in samples for document in split_documents(sample)]
        count = sum(sum(document.trained[1:]) for document in documents)
        total = 0.0
        for document in documents:
            inputs = processed(prepared, document)
            assert inputs["input_ids"].tolist() == [document.input_ids]
            logits = model(**inputs, use_cache=False).logits[0, :-1].float()
            trained = torch.tensor(document.trained[1:], dtype=torch.bool)
            loss = torch.nn.functional.cross_entropy(
                logits[trained], inputs["input_ids"][0, 1:][trained], reduction="sum"
            )
            (loss / count).backward()
            total += loss.item()
        losses.append(total / count)
    return losses


def processed(prepared: Any, document: Sample) -> Any:
    """The inputs that the processor of transformers makes of a document's text and images."""
    text = prepared.tokenizer.decode(document.input_ids, skip_special_tokens=False)
    text = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", text)
    text = re.sub(r"\n\n<start_of_image>(<image_soft_token>)+<end_of_image>\n\n", "<start_of_image>", text)
    images = [decode_image(read_stored(each)[0], "") for part in document.images for each in part]
    assert prepared.images is not None
    return prepared.images._processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_transformers_and_peft(family: str, packing: bool, root: Path) -> None:
    config = run_config(root, family, dataset__packing=packing)
    model, lines, losses = train(config)
    assert losses == pytest.approx(plain_vision_losses(config), rel=1e-5)
    assert len({round(loss, 4) for loss in losses}) == 3, "nothing was learned that could differ"
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained and not any("visual" in name or "vision" in name or "projector" in name for name in trained)
    assert any("without adapter: " in line and "vis" in line for line in lines)
