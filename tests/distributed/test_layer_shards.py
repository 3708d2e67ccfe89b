"""ZeRO-3 per layer: what stage 2 trains, to the last bit that sums in another order leave, with less on each rank."""

import json
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch, run_ranks
from tests.distributed.plan import case
from tests.tiny import make_model

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

STEPS = 10
CHECKPOINTING = ("none", "non_reentrant", "selective")
# Settings under which stage 3 per layer must train what stage 2 trains.
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"base_model": "tied"},
    "bf16": {"training__precision": "bf16"},
    "qlora-bf16": {"training__precision": "bf16", "adapter": "qlora", "ops__backend": "reference"},
    "not-nested": {"adapter": "qlora", "quantization__double_quant": False},
    "modules-to-save": {"lora__modules_to_save": "lm_head,norm"},
    "added-tokens": {"model__added_tokens": ["<note>"]},
    "adapted-embeddings": {"lora__target_modules": "q_proj,lm_head,embed_tokens", "ops__backend": "reference"},
    "orthogonal": {"lora__init": "orthogonal"},
    "packed": {"dataset__packing": True},
    "separate": {"ops__flat": False},
    "steered": {"scu__enabled": True, "scu__target": 0.01},
    "answers": {"logging__sample_prompts": ["red cat", "blue dog"], "logging__sample_tokens": 6},
}
CUT = {"training__max_steps": 6, "training__save_steps": 3, "lora__dropout": 0.1}
# Where a run was stopped, and where it resumes bit by bit: layers and stage 2 have the same engine.
MOVES: dict[str, tuple[str, dict[str, Any]]] = {
    "layer-again": ("cut-layer", {"zero__stage": 3}),
    "module-again": ("cut-module", {"zero__stage": 3, "zero__gather": "module"}),
    "up": ("cut-2", {"zero__stage": 3}),
    "down": ("cut-layer", {"zero__stage": 2}),
}


def _plan() -> list[dict[str, Any]]:
    cases = []
    for adapter in ("lora", "qlora"):
        common = {"adapter": adapter, "training__max_steps": STEPS}
        cases.append(case(f"{adapter}-2", zero__stage=2, **common))
        module = {"zero__stage": 3, "zero__gather": "module", **common}
        cases.append(case(f"{adapter}-module-none", **module))
        recompute = {"ops__backend": "reference", "training__gradient_checkpointing": "non_reentrant"}
        cases.append(case(f"{adapter}-module-recomputed", **module, **recompute))
        for backend in ("peft", "reference"):
            for checkpointing in CHECKPOINTING:
                recompute = {"training__gradient_checkpointing": checkpointing, "ops__backend": backend}
                cases.append(case(f"{adapter}-layer-{backend}-{checkpointing}", zero__stage=3, **common, **recompute))
        offload = {"zero__offload_parameters": True, "zero__offload_optimizer": True}
        cases.append(case(f"{adapter}-offloaded", zero__stage=3, **offload, **common))
    for name, settings in VARIANTS.items():
        cases += [case(f"{name}-{stage}", zero__stage=stage, **settings) for stage in (2, 3)]
    cases += [case("cut-2", zero__stage=2, **CUT), case("cut-layer", zero__stage=3, **CUT)]
    cases.append(case("cut-module", zero__stage=3, zero__gather="module", **CUT))
    for name, (origin, settings) in {**MOVES, "from-module": ("cut-module", {"zero__stage": 3})}.items():
        resume = {"training__resume_from_checkpoint": f"{origin}/checkpoint-3", "output_dir": name}
        cases.append(case(name, **CUT, **settings, **resume))
    cases.append(case("dora", zero__stage=3, lora__dora=True, training__max_steps=1))
    for planned in cases:
        planned["overrides"].setdefault("base_model", "wide")
    return cases


ONE_RANK = [
    case(
        "alone",
        base_model="wide",
        zero__stage=3,
        training__gradient_accumulation_steps=4,
        training__resume_from_checkpoint="cut-layer/checkpoint-3",
        output_dir="alone",
        **CUT,
    )
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Every case, on two ranks; then the one that resumes on one rank. Embedding and head are wide enough to be cut."""
    folder = tmp_path_factory.mktemp("layers")
    make_model(folder / "wide", vocab_size=4096)
    make_model(folder / "tied", vocab_size=4096, tie_word_embeddings=True, attention_bias=True)
    launch(folder, 2, _plan(), environment())
    launch(folder, 1, ONE_RANK, environment())
    return Matrix(folder, [*_plan(), *ONE_RANK])


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("backend", ["peft", "reference"])
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_losses_are_those_of_stage_2(runs: Matrix, adapter: str, backend: str, checkpointing: str) -> None:
    expected, layer = runs[f"{adapter}-2"], runs[f"{adapter}-layer-{backend}-{checkpointing}"]
    assert len(layer.losses) == STEPS
    assert layer.losses == pytest.approx(expected.losses, rel=1e-6)
    assert layer.records("train/grad_norm") == pytest.approx(expected.records("train/grad_norm"), rel=1e-4)
    assert layer.records("eval/loss") == pytest.approx(expected.records("eval/loss"), rel=1e-6)
    assert "base: sharded in 4 units" in layer.console  # two layers, embedding and head
    if backend == "reference":
        assert "fused 14 of 14 adapted layers (reference: requested), 10 of them grouped" in layer.console


@pytest.mark.parametrize("kind", ["none", "recomputed"])
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_deepspeeds_own_stage_3_can_be_requested(runs: Matrix, adapter: str, kind: str) -> None:
    case = runs[f"{adapter}-module-{kind}"]
    assert case.losses == pytest.approx(runs[f"{adapter}-2"].losses, rel=1e-6)
    assert "base: gathered by DeepSpeed (zero.gather: module, as configured)" in case.console


def test_unsupported_settings_fall_back_to_deepspeed_with_a_reason(runs: Matrix) -> None:
    assert "(zero.gather: module, DoRA needs unpartitioned weights for its initialization)" in runs["dora"].console


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_shards_in_host_memory_change_nothing(runs: Matrix, adapter: str) -> None:
    assert runs[f"{adapter}-offloaded"].losses == pytest.approx(runs[f"{adapter}-2"].losses, rel=1e-6)
    assert "in host memory" in runs[f"{adapter}-offloaded"].console


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_is_that_of_stage_2(runs: Matrix, name: str) -> None:
    layer, expected = runs[f"{name}-3"], runs[f"{name}-2"]
    assert layer.losses == pytest.approx(expected.losses, rel=1e-6)
    assert "base: sharded in" in layer.console
    assert layer.adapter().keys() == expected.adapter().keys()
    for key, value in expected.adapter().items():
        # AdamW's first steps have the sign of the gradient: where that is nothing but rounding, weights differ by it.
        torch.testing.assert_close(layer.adapter()[key], value, rtol=2e-7, atol=2e-8)
    answers = [line for line in layer.console.splitlines() if line.startswith("  -> ")]
    assert answers == [line for line in expected.console.splitlines() if line.startswith("  -> ")]
    assert len(answers) == (4 if name == "answers" else 0)


@pytest.mark.parametrize("name", MOVES)
def test_a_run_resumes_bit_by_bit(runs: Matrix, name: str) -> None:
    origin, _ = MOVES[name]
    assert len(runs[name].losses) == 3
    assert runs[name].losses == runs[origin].losses[3:]
    for key, value in runs[origin].adapter().items():
        assert torch.equal(runs[name].adapter()[key], value), key


@pytest.mark.parametrize("name", ["from-module", "alone"])
def test_a_run_resumes_from_another_engine_and_number_of_ranks(runs: Matrix, name: str) -> None:
    """Dropout draws again there, and moves the loss of these few tokens by about 1e-3."""
    assert len(runs[name].losses) == 3
    assert runs[name].losses == pytest.approx(runs["cut-layer"].losses[3:], abs=1e-2)
    if name == "alone":
        assert "base: not sharded, on the only rank" in runs[name].console


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """What both ranks need at most to load and to train, by kind of base; bytes."""
    folder = tmp_path_factory.mktemp("layer-memory")
    make_model(folder / "small", layers=2, hidden=512, vocab_size=1024)
    make_model(folder / "model", layers=48, hidden=512, vocab_size=1024)
    # Freed tensors go back to the system at once, so that resident memory is what is held.
    env = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    module, log = "tests.distributed.layer_memory_case", folder / "log"
    assert run_ranks(2, module, str(folder), env=env, log=log, timeout_s=500) == 0, log.read_text()[-3000:]
    return [json.loads((folder / f"peaks-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("phase", ["load", "train"])
def test_a_rank_never_has_more_than_its_shard_and_two_layers(
    peaks: list[dict[str, dict[str, int]]], kind: str, phase: str
) -> None:
    """Weights: the share and two units. Plus the adapter, the copies of a transport and a product, and noise."""
    for rank in peaks:
        figures = rank[kind]
        assert figures["share"] < 0.51 * figures["whole"]
        assert figures["gathered"] <= figures["two_units"] < 0.1 * figures["whole"]
        bound = sum(figures[name] for name in ("share", "two_units", "slack", "rest"))
        assert figures[phase] < bound, figures
        assert bound < 0.85 * figures["whole"], "the bound must detect a rank that holds the whole base"
