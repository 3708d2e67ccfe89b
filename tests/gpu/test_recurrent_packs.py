"""Packs on a card for a model of Qwen3.5's shape: documents stay apart in its kernels, and packing against padding."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import ROOT
from tests.tiny import make_tokenizer, write_chats
from trainer.config import LoraSection
from trainer.data.batches import collate_samples
from trainer.data.samples import Sample
from trainer.model.adapter import apply_adapter
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packed_attention import use_varlen_if_supported
from trainer.patches.packing_probe import separate_documents
from trainer.patches.per_document import PerDocumentForward

pytestmark = pytest.mark.gpu

# Every fourth layer attends. The widths are those of Qwen3.5 0.8B, but for its large vocabulary.
SHAPE: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 4096, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = [300, 65, 20, 639, 1, 511]
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    pytest.importorskip("fla", reason="tests/gpu/test_recurrent_packs.py looks at the real card with fla-core")
    from transformers import AutoConfig, AutoModelForCausalLM

    found = tmp_path_factory.mktemp("recurrent")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(found / "model")
    make_tokenizer(found / "model")
    write_chats(found / "train.jsonl", 4000, longest=40)
    return found


def learn(loss: TokenLoss, model: Any, batches: list[Any]) -> tuple[float, torch.Tensor]:
    """Return loss sum and gradient of all batches."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        found = loss(model, batch, torch.device("cuda"))
        found.backward()
        total += float(found.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return total, torch.cat([gradient.flatten().double() for gradient in gradients])


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-2), (torch.bfloat16, 6e-2)])
def test_packed_documents_learn_what_they_learn_alone(folder: Path, dtype: torch.dtype, allowed: float) -> None:
    """Loose bounds: the kernels round products to 10 or 7 bits; documents that see each other are far outside."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).cuda()
    use_varlen_if_supported(model, torch.device("cuda"), dtype)
    model = apply_adapter(model, LoraSection(r=8), torch.float32).train()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    loss = TokenLoss(model)
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 380, (sum(LENGTHS),), generator=draw)
    pack = Sample(ids.tolist(), [True] * len(ids), LENGTHS)
    documents = [Sample(part.tolist(), [True] * len(part), [len(part)]) for part in ids.split(LENGTHS) if len(part) > 1]
    alone, expected = learn(loss, model, [collate_samples([each], 0, packed=False, flat=False) for each in documents])
    flat = separate_documents(loss, model, 0, torch.device("cuda"))
    found, gradient = learn(loss, model, [collate_samples([pack], 0, packed=True, flat=flat)])
    separate = [vars(part).get("forward") for part in model.modules()]
    by_kernels = {forward.by_kernels for forward in separate if isinstance(forward, PerDocumentForward)}
    error = float((gradient - expected).norm() / expected.norm())
    print(f"\n{dtype}: by kernels {by_kernels}, loss {found / alone - 1:+.1e}, gradient {error:.1e}")
    assert by_kernels == {True}, "fla's kernels take bounds"
    assert found == pytest.approx(alone, rel=allowed / 10)
    assert error < allowed


def tokens_per_second(folder: Path, *, packing: bool) -> float:
    name = "packed" if packing else "padded"
    config = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / name),
        "lora": {"r": 16, "alpha": 32},
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 1024, "packing": packing},
        "training": {"max_steps": STEPS, "batch_size": 4 if packing else 32, "precision": "bf16"},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "launcher.cli", "train", str(folder / f"{name}.yaml"), "--num-gpus", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    env.pop("DS_ACCELERATOR", None)
    result = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=270)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0]
    speeds = sorted(line["perf/tokens_per_second"] for line in lines if "perf/tokens_per_second" in line)
    print(f"\n{name}: {speeds[len(speeds) // 2]:,.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return float(speeds[len(speeds) // 2])


def test_packing_against_padding(folder: Path) -> None:
    padded, packed = (tokens_per_second(folder, packing=packing) for packing in (False, True))
    print(f"\npacked / padded: {packed / padded:.2f}, on {torch.cuda.get_device_name()}, torch {torch.__version__}")
