"""Two ranks with a base gathered per layer and tokens routed to different experts; see test_mixtures.py."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.monitor.hooks import ExpertLoad
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.layer_gather.unit import ShardedUnit

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)
ATTENTION = LoraSection(r=4, init="gaussian", target_modules=("q_proj", "v_proj"))
EXPERTS = LoraSection(r=4, init="gaussian")


def run(rank: int, folder: Path) -> None:
    """One rank; writes what it gathered, and how far its gradients are from those of the whole model."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in ("lora", "qlora", "mxfp4"):
        for lora, recompute in ((ATTENTION, False), (ATTENTION, True), (EXPERTS, False), (EXPERTS, True)):
            path = folder / ("gpt_oss" if kind == "mxfp4" else "mixtral")
            quantization = QuantizationSection() if kind == "qlora" else None
            shards = LayerShards(CPU)
            order: list[str] = []
            cut, load = _gradients(path, quantization, lora, shards, order, rank, recompute=recompute)
            whole, _ = _gradients(path, quantization, lora, None, [], rank, recompute=False)
            worst = max(float((a - b).abs().max()) for a, b in zip(cut, whole, strict=True))
            found[f"{kind}-{lora is EXPERTS}-{recompute}"] = {
                "order": order,
                "worst": worst,
                "some": any(each.any() for each in cut),
                "load": load,
            }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _gradients(
    path: Path,
    quantization: QuantizationSection | None,
    lora: LoraSection,
    shards: LayerShards | None,
    order: list[str],
    rank: int,
    *,
    recompute: bool,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager", "quantization": quantization}
    torch.manual_seed(0)
    model: Any = apply_adapter(load_base_model(str(path), ModelSection(), shards=shards, **how), lora, torch.float32)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if shards is not None:
        shards.attach(model)
        for unit in shards.units:
            unit.start = partial(_watched, unit, unit.start, order)  # type: ignore[method-assign]
    if rank == 0:
        for _, module in model.named_modules():
            if "Router" in type(module).__name__:
                module.register_forward_hook(_all_to_the_first)
    load = ExpertLoad(model.train())
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    for _ in range(2):  # as in gradient accumulation
        model(input_ids=IDS + rank, labels=IDS + rank, use_cache=False).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    return grads, load.compute_metrics()


def _all_to_the_first(module: Any, inputs: Any, output: Any) -> Any:
    logits, weights, index = output
    return logits, weights, torch.zeros_like(index)


def _watched(unit: ShardedUnit, start: Any, order: list[str]) -> None:
    if not unit.is_gathered:
        order.append(unit.name)
    start()
