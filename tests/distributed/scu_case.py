"""Every rank's part of test_information.py: the controller on real DeepSpeed engines, next to one process without any.

Started with a path; rank 0 writes there, as JSON, what the test compares.
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import ScuSection, TrainingSection, ZeroSection
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config, start_engine
from trainer.parallel.ranks.group import Ranks, form_process_group, leave_process_group, sum_over_ranks
from trainer.patches.deepspeed_workarounds import compute_gradient_norm
from trainer.scu import law as scu
from trainer.scu.controller import ScuController, ScuError

WORLD, ACCUMULATION, BATCH, LENGTH, VOCABULARY, TOKENS = 2, 2, 2, 12, 64, 400
RATE = 0.05
# 45 and rank 3 make matrices of an odd number of elements, which two shards have to pad.
MODEL = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
SETTINGS = dict(
    enabled=True, law="published", target=0.05, kp=3.0, ki=0.5, lambda_start=0.5, sigma=0.05, lambda_max=10.0
)


def build(checkpointing: str = "none", dora: bool = False) -> nn.Module:
    """The same tiny adapted model on every rank, with a B that is not zero."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(MODEL)
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lora = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
    adapted = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return adapted.train()


def batches(step: int) -> list[list[tuple[Tensor, Tensor]]]:
    """[micro-step][rank] of (tokens, targets), each with another number of target tokens; the last rank's may be 0."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows: list[list[tuple[Tensor, Tensor]]] = []
    for micro in range(ACCUMULATION):
        rows.append([])
        for rank in range(WORLD):
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
            targets = tokens.roll(-1, dims=1)
            targets[:, : 1 + (5 * micro + 3 * rank + step) % LENGTH] = -100
            rows[-1].append((tokens, targets))
    return rows


def loss_sum_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def count(step: int) -> int:
    return sum(int((targets != -100).sum()) for row in batches(step) for _, targets in row)


def one_process(measure: str, steps: int, dora: bool) -> dict[str, Any]:
    """The same steps without ranks, engine or the code under test: PEFT's update squared, plain autograd, the law."""
    model = build(dora=dora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    law = scu.Law(target=0.05, kp=3.0, ki=0.5, lambda_start=0.5, total_updates=steps)
    state = scu.build_initial_state(law)
    out: dict[str, Any] = {"lambda": [], "squares": [], "data_bpt": []}
    for step in range(1, steps + 1):
        loss_sum = torch.stack([loss_sum_of(model, *batch) for row in batches(step) for batch in row]).sum()
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        squares = torch.zeros(())
        for layer in layers:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            if measure == "delta":
                squares = squares + (layer.scaling["default"] * b @ a).square().sum()
            else:
                squares = squares + a.square().sum() + b.square().sum()
        nats = squares / (2 * 0.05**2 * TOKENS)
        (loss_sum / count(step) + state.lambda_ * nats).backward()
        out["lambda"].append(state.lambda_)
        out["squares"].append(squares.item())
        out["data_bpt"].append(loss_sum.item() / count(step) / math.log(2))
        bits = nats.item() / math.log(2)
        state = scu.advance(law, state, bits / (bits + out["data_bpt"][-1]))
        optimizer.step()
        optimizer.zero_grad()
    return out | {"weights": weights_of(model)}


def on_engine(
    stage: int, measure: str, steps: int, *, threshold: int = 0, checkpointing: str = "none", dora: bool = False,
    inspect: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """The steps as the training loop makes them, on a DeepSpeed engine of `stage`."""
    model = build(checkpointing, dora)
    training = TrainingSection(batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, max_grad_norm=0.0)
    # Without these two, ZeRO-3 keeps a model this small gathered from the forward to the backward.
    release = {"zero_optimization": {"stage3_max_reuse_distance": 0}} if stage == 3 else {}
    zero = ZeroSection(stage=stage, persistence_threshold=threshold, max_live_parameters=1, extra=release)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    engine: Any = start_engine(model, optimizer, build_deepspeed_config(training, zero, "fp32", on_gpu=False))
    section = ScuSection(measure=measure, check_every=7, **SETTINGS)
    scu_controller = ScuController(section, model, target_tokens=TOKENS, total_steps=steps, base_parameters=1)
    assert scu_controller.information is not None
    low, high = scu_controller.information.compute_reachable_bounds(0.0, 0.0)
    rank = dist.get_rank()
    out: dict[str, Any] = {"lambda": [], "squares": [], "partitioned": 0, "before": [low, high], "norms": []}
    for step in range(1, steps + 1):
        target_tokens, loss_sum_local = count(step), torch.zeros(())
        for micro, row in enumerate(batches(step)):
            last = micro == ACCUMULATION - 1
            loss_sum = loss_sum_of(engine, *row[rank])
            loss_sum_local += loss_sum.detach()
            loss = loss_sum * (WORLD * ACCUMULATION / target_tokens)
            if last:
                chunks = scu_controller.information.chunks
                out["partitioned"] += sum(p.numel() == 0 for chunk in chunks for p in (*chunk.a, *chunk.b))
                loss = loss + ACCUMULATION * scu_controller.compute_penalty(step)
                out["lambda"].append(scu_controller.lambda_)
            engine.backward(loss)
            if last:
                sums = torch.stack([loss_sum_local.double(), scu_controller.get_local_contribution()])
                loss_sum_global, squares_global = sum_over_ranks(sums)
                scu_controller.observe(step, loss_sum_global, target_tokens, squares_global)
                out["squares"].append(squares_global.item())
                if stage in (1, 2):
                    out["norms"].append(norms_of(engine.optimizer))
            engine.step()
    scu_controller.apply_pending_measurement()
    out["timed"] = engine.tput_timer.config.enabled
    out["data_bpt"] = [record["data_bpt"] for record in scu_controller.records]
    if inspect is not None:
        out["inspected"] = inspect(scu_controller, steps)
    out["weights"] = weights_of(model)
    engine.destroy()
    return out


def norms_of(optimizer: Any) -> list[float]:
    """The norm of the reduced gradients: DeepSpeed's, ours, and ours with a NaN on the last rank."""
    gradients, parameters = optimizer.averaged_gradients[0], optimizer.params_in_partition[0]
    norms = [optimizer.get_grad_norm_direct(gradients, parameters), compute_gradient_norm(optimizer, gradients)]
    broken = [g * math.nan if dist.get_rank() == WORLD - 1 else g for g in gradients]
    return [float(norm) for norm in (*norms, compute_gradient_norm(optimizer, broken))]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    whole = [parameter for _, parameter in trained if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(whole) if whole else nullcontext():
        return {name: parameter.detach().clone() for name, parameter in trained}


def compare(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    start = {name: p.detach() for name, p in build().named_parameters() if name in want["weights"]}
    error = max((got["weights"][name] - weight).abs().max().item() for name, weight in want["weights"].items())
    moved = max((weight - start[name]).abs().max().item() for name, weight in want["weights"].items() if name in start)
    return {
        "weight_error": error,
        "weight_moved": moved,
        "partitioned": got["partitioned"],
        "before": got["before"],
        "norms": got["norms"],
        "timed": got["timed"],
        **{key: [got[key], want[key]] for key in ("lambda", "squares", "data_bpt")},
    }


def disagreement(scu_controller: ScuController, steps: int) -> dict[str, Any]:
    """What all ranks have as lambda, and what happens when rank 1's is off by one bit."""
    lambdas: list[Any] = [None] * WORLD
    dist.all_gather_object(lambdas, [record["lambda"].hex() for record in scu_controller.records])
    if dist.get_rank() == 1:
        scu_controller.state = replace(scu_controller.state, lambda_=math.nextafter(scu_controller.lambda_, 100.0))
    try:
        scu_controller.observe(7 * steps, torch.ones(()), 1, torch.ones(()))
    except ScuError as fault:
        message = str(fault)
    else:
        message = "no fault"
    return {"lambdas": lambdas, "fault": message}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of every comparison."""
    for measure in ("delta", "factors"):
        want = one_process(measure, 3, dora=False)
        for stage in (0, 1, 2, 3):
            yield f"{measure}-stage{stage}", compare(on_engine(stage, measure, 3), want)
        yield f"{measure}-stage3-resident", compare(on_engine(3, measure, 3, threshold=10**6), want)
        for stage in (2, 3):
            got = on_engine(stage, measure, 3, checkpointing="non_reentrant")
            yield f"{measure}-stage{stage}-checkpointing", compare(got, want)
    want = one_process("delta", 3, dora=True)
    yield "delta-stage2-dora", compare(on_engine(2, "delta", 3, dora=True), want)
    yield "agreement", on_engine(2, "delta", 50, inspect=disagreement)["inspected"]


@contextmanager
def process_group() -> Iterator[None]:
    form_process_group(Ranks.from_environment(), timeout_minutes=2)
    try:
        yield
    finally:
        leave_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group():
        results = dict(cases())
        if dist.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")
