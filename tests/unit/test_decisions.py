"""One record of decisions: made from configuration, machine and empty model; executed, estimated by and printed."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import AUTO, LoraSection, ModelSection, RunConfig
from trainer.data.batches import MicroBatch
from trainer.memory.bytes import GIB
from trainer.memory.decisions import Decisions, Machine, decide
from trainer.memory.model_widths import read_shapes
from trainer.memory.planner import DataSize, Planner, apply_changes
from trainer.patches.loss_head import TokenLoss

TRAINER = Path(__file__).parents[2] / "trainer"
GPU = Machine.assume_gpus(1, "bf16")
AGAIN = {"training.gradient_checkpointing": "non_reentrant"}
TILED = AGAIN | {"training.tiled_mlp": "auto"}
SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def config_of(**changes: Any) -> RunConfig:
    data = {"path": "unset.jsonl", "max_length": 2048, "packing": True}
    config = RunConfig.model_validate({"base_model": "unset", "output_dir": "unset", "dataset": data})
    return apply_changes(config, {"training.batch_size": 4} | changes)


def planner(model_type: str, machine: Machine = GPU, **settings: Any) -> Planner:
    known = AutoConfig.for_model(model_type, **(SIZES | settings))
    return Planner(read_shapes(known, ModelSection(), LoraSection()), DataSize(2048, 2048), machine)


def decided(model_type: str, machine: Machine = GPU, **changes: Any) -> Decisions:
    return planner(model_type, machine, vocab_size=512).build_decisions(config_of(**changes))


def test_logits_that_are_capped_count_whole() -> None:
    """Gemma 2: 8,192 targets of 256,000 logits at 12 bytes and more, which the fused loss would not take."""
    capped = planner("gemma2", vocab_size=256_000)
    assert capped.build_decisions(config_of()).fused_head.reason == "the model caps its logits"
    assert capped.estimate(config_of()).terms["logits and loss"] > 12 * 8192 * 256_000
    plain = planner("gemma2", vocab_size=256_000, final_logit_softcapping=None)
    assert plain.build_decisions(config_of()).fused_head.value is True
    assert capped.estimate(config_of()).peak > plain.estimate(config_of()).peak + 25e9


def test_the_batch_that_is_found_has_room_for_capped_logits() -> None:
    capped, memory = planner("gemma2", vocab_size=256_000), 40 * GIB
    resolved = capped.resolve(config_of(**{"training.batch_size": AUTO}), memory)
    per_row = 12 * 2048 * 256_000
    assert 1 <= resolved.training.batch_size <= memory // per_row
    assert capped.estimate(resolved).needed <= memory


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, {"attention": "varlen", "norms": "ours", "swiglu": "ours", "fused_head": True, "flat": True}),
        ("llama", {"dataset.packing": False}, {"attention": "sdpa"}),
        ("llama", {"ops.elementwise": "off"}, {"norms": "model", "rotary": "model", "recomputed_results": "none"}),
        ("llama", {"training.torch_compile": True}, {"norms": "model", "flat": False, "siblings": False}),
        (
            "llama",
            {"training.gradient_checkpointing": "non_reentrant"},
            {"recomputed_results": "none", "norms": "ours"},
        ),
        ("llama", {"zero.stage": 3}, {"gather": "layer", "fused_head": True, "clips_on_device": True}),
        ("llama", {"zero.stage": 3, "zero.gather": "module"}, {"gather": "module", "fused_head": False, "flat": False}),
        ("llama", {"adapter": "none"}, {"adapters": "none", "fused_head": False, "flat": False}),
        ("gemma2", {}, {"attention": "eager", "norms": "ours", "swiglu": "ours", "fused_head": False}),
        ("gpt2", {}, {"norms": "model", "swiglu": "model", "fused_head": True}),
        ("llama", {"training.cuda_graphs": "auto"}, {"cuda_graphs": None}),
        ("llama", {"training.cuda_graphs": "on"}, {"cuda_graphs": True}),
        ("llama", {"training.cuda_graphs": "off"}, {"cuda_graphs": False}),
        ("llama", {"zero.stage": 3}, {"cuda_graphs": False}),
        ("llama", {}, {"mlp_tile": 0}),
        ("llama", {"dataset.max_length": 8192}, {"mlp_tile": 0}),
        ("llama", {"dataset.max_length": 8192} | AGAIN, {"mlp_tile": 8192, "cuda_graphs": False}),
        ("llama", {"dataset.max_length": 8192, "parallel.sequence": 2} | TILED, {"mlp_tile": 0}),
        ("llama", {"dataset.max_length": 8192, "lora.dropout": 0.1} | TILED, {"mlp_tile": 0}),
        ("llama", {"dataset.max_length": 8192} | AGAIN | {"training.tiled_mlp": False}, {"mlp_tile": 0}),
        ("llama", {"training.tiled_mlp": 512} | AGAIN, {"mlp_tile": 512}),
        ("llama", {"training.tiled_mlp": True, "zero.stage": 3} | AGAIN, {"mlp_tile": 8192}),
    ],
)
def test_decisions_on_a_gpu(model_type: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = {name: choice.value for name, choice in vars(decided(model_type, **changes)).items()}
    assert {name: found[name] for name in expected} == expected


def test_decisions_on_a_cpu_have_reasons() -> None:
    found = decided("llama", Machine(2, False, "fp32", own_kernels=False, flash=False))
    assert (found.norms.value, found.norms.reason) == ("model", "no GPU")
    assert (found.adapters.value, found.clips_on_device.value) == ("peft", False)
    assert found.cuda_graphs.value is False and found.format_summary().endswith("CUDA graphs: no (no GPU)")
    assert found.format_summary().startswith(
        "decided: attention: sdpa (without flash attention, packed documents need a mask), "
    )
    assert found.to_json()["adapters"] == {"value": "peft", "reason": "ops.backend: auto on a CPU"}


def test_reference_text_has_its_own_pass_and_thus_its_own_backward_pass() -> None:
    """Both are kept; of a recomputed layer only the larger pass's buffer exists at a time."""
    kl: dict[str, Any] = {"scu.enabled": True, "scu.measure": "kl", "scu.reference": "x.jsonl"}
    recomputed = {"training.gradient_checkpointing": "non_reentrant"}
    llama = planner("llama", vocab_size=512)
    steered, plain = config_of(**kl, **recomputed), config_of(**recomputed)
    work, alone = (llama.build_micro_step(config, llama.build_decisions(config)) for config in (steered, plain))
    assert work.rows == alone.rows + 1 == steered.training.batch_size + 1
    assert work.larger_pass_rows == alone.larger_pass_rows == steered.training.batch_size
    term = "backward of a layer"
    assert llama.estimate(steered).terms[term] == pytest.approx(llama.estimate(plain).terms[term], rel=1e-3)


def test_cached_reference_states_count_as_host_memory() -> None:
    """As many places as the file has, 256 wide, in 16 bits; 1 GiB at most."""
    kl: dict[str, Any] = {
        "scu.enabled": True,
        "scu.measure": "kl",
        "training.batch_size": 1,
        "scu.reference": "x.jsonl",
    }
    llama = planner("llama", vocab_size=512)

    def kept(changes: dict[str, Any], reference: int | None = None) -> int:
        looked = replace(llama, lengths=replace(llama.lengths, reference=reference))
        config = config_of(**kl | changes)
        size = looked._build_placement(config, looked.build_decisions(config)).base_states
        assert looked.estimate(config).host >= size
        return size

    assert kept({}) == 0 and kept({}, 1000) == 1000 * 256 * 2
    assert kept({"scu.reference_cache": False}, 1000) == 0
    assert kept({}, 2**22) == 0 and kept({"scu.reference_cache": True}, 2**22) == 2**31


def test_a_model_that_cannot_be_built_empty_is_decided_in_the_first_step() -> None:
    assert decide(config_of(), GPU, None).fused_head.value is None


def test_an_unexpected_head_is_reported() -> None:
    """The record expects a fused loss of a model that caps its logits after all."""
    known = AutoConfig.for_model("gemma2", **SIZES, vocab_size=128, final_logit_softcapping=3.0)
    model = AutoModelForCausalLM.from_config(known).requires_grad_(False)
    batch = MicroBatch(torch.arange(8)[None], torch.arange(8)[None], 8)
    said: list[str] = []
    loss = TokenLoss(model, fused=True, log=said.append)
    loss(model, batch, torch.device("cpu"))
    loss(model, batch, torch.device("cpu"))
    assert len(said) == 1 and "materialized logits" in said[0]
    TokenLoss(model, fused=False, log=said.append)(model, batch, torch.device("cpu"))
    assert len(said) == 1, "what was decided is what was done"


def test_nobody_else_decides() -> None:
    """The rules are called where the record is made, and where settings are checked against one another."""
    rules = {"describe_flat_problem", "gathers_per_layer", "describe_layer_gather_problem", "can_guard_on_device"}
    may = {"decisions.py", "zero.py", "checks.py", "mistakes.py", "deepspeed_engine.py", "stored_settings.py"}
    callers = {
        path.name
        for path in TRAINER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in rules
    }
    assert callers <= may
