"""Model families, each with code of its own in transformers: trained as plain PEFT trains them, packed or not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.distributed.test_architectures import make_architecture
from tests.plain_peft import plain_losses
from trainer.config import load_config

pytestmark = pytest.mark.distributed

RELATIVE = 1e-6
RATE = 1e-2
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Dropout would draw for other rows than plain PEFT has.
GPT2 = {"n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "deepseek_v3": EXPERTS | LATENT,
    "exaone4": {},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "gpt2": GPT2,
    "gpt_neox": {},
    "gptj": GPT2 | {"rotary_dim": 8},
    "gpt_oss": EXPERTS | {"head_dim": 16, "sliding_window": 16},
    "mixtral": EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "qwen3_moe": EXPERTS,
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
# Their documents see each other in a pack, which is refused.
NOT_PACKED: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {"d_model": 64, "n_heads": 4, "max_seq_len": 256},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
}
COMMON = {"ops__backend": "reference", "training__learning_rate": RATE}


def plan() -> list[dict[str, Any]]:
    alone = [case(name, base_model=f"{name}-model", **COMMON) for name in (*FAMILIES, *NOT_PACKED)]
    packed = {"dataset__packing": True, **COMMON}
    # Its output head is stored under another name than it has.
    module = {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0}
    renamed = case("gpt_neox-streamed", base_model="gpt_neox-model", **module, **COMMON)
    return [*alone, *(case(f"{name}-packed", base_model=f"{name}-model", **packed) for name in FAMILIES), renamed]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("families")
    for name, settings in (FAMILIES | NOT_PACKED).items():
        make_architecture(folder / f"{name}-model", name, {"num_hidden_layers": 2, **settings})
    launch(folder, 1, plan(), environment())
    return Matrix(folder, plan())


def plain(run: Path, *overrides: str) -> list[float]:
    """Plain PEFT on one rank's global batches, with the attention that transformers chooses."""
    model = run.parent / f"{run.name.removesuffix('-packed')}-model"
    settings = [f"base_model={model}", f"training.learning_rate={RATE}", *overrides]
    config = load_config(run.parent / "base.yaml", settings).config
    return plain_losses(config, ranks=1, attention=None, device=torch.device("cpu"))


@pytest.mark.parametrize("name", [*FAMILIES, *NOT_PACKED])
def test_losses_are_those_of_plain_peft(runs: Matrix, name: str) -> None:
    run = runs[name]
    assert run.losses == pytest.approx(plain(run.folder), rel=RELATIVE)
    assert len({round(loss, 4) for loss in run.losses}) > 1, "nothing was learned that could differ"


def test_renamed_weights_are_found_one_by_one(runs: Matrix) -> None:
    assert runs["gpt_neox-streamed"].losses == pytest.approx(runs["gpt_neox"].losses, rel=RELATIVE)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_losses_are_those_of_the_documents_one_by_one(runs: Matrix, name: str) -> None:
    run = runs[f"{name}-packed"]
    assert run.losses == pytest.approx(plain(run.folder, "dataset.packing=true"), rel=RELATIVE)
