"""How much memory a rank needs at most to load a base per layer and to train on it; see test_layer_shards.py."""

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.distributed.memory_case import _status
from tests.rank_program import join
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.parallel.engine.layer_gather.shards import LayerShards, plan_units
from trainer.parallel.engine.layer_gather.unit import ShardedUnit
from trainer.parallel.ranks.group import exit_process, leave_process_group

KINDS: dict[str, tuple[torch.dtype, QuantizationSection | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "nf4": (torch.bfloat16, QuantizationSection()),
}
TOKENS = 2
NOISE = 6 << 20  # of an allocator, and small activations


class Peak:
    """Bytes by which resident memory has grown at most since the beginning, or since `forget`."""

    def __init__(self) -> None:
        gc.collect()
        self._before = _status("VmRSS")
        self.forget()

    def forget(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def growth(self) -> int:
        return _status("VmHWM") - self._before


def measure(path: Path, kind: str, device: torch.device) -> dict[str, int]:
    """Peaks of loading and of two passes both ways, and their expected parts; bytes."""
    dtype, quantization = KINDS[kind]
    shards = LayerShards(device)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "attention": "sdpa", "quantization": quantization}
    peak = Peak()
    model: Any = load_base_model(str(path), ModelSection(), shards=shards, **how)
    figures = {"load": peak.growth()}
    model = apply_adapter(model, LoraSection(r=1), dtype)
    shards.attach(model)
    together = watch_gathered(shards)
    peak.forget()
    ids = torch.arange(TOKENS)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    figures["train"] = peak.growth()
    cut = {id(parameter) for unit in plan_units(model) for parameter in map(model.get_parameter, unit.parameters)}
    sizes = sorted(unit.bytes_gathered for unit in shards.units)
    largest = max(parameter.numel() for parameter in model.parameters())
    return figures | {
        "share": sum(unit.bytes_held for unit in shards.units),
        "whole": sum(sizes),
        "two_units": sum(sizes[-2:]),
        "gathered": max(together),
        # gloo receives in memory of its own, and products on a CPU work on 32-bit copies of a matrix.
        "slack": 3 * sizes[-1] + 3 * 4 * largest,
        "rest": 2 * sum(p.nbytes for p in model.parameters() if id(p) not in cut) + NOISE,
    }


def watch_gathered(shards: LayerShards) -> list[int]:
    """Bytes that are gathered together, after every gather that begins from now on."""
    together: list[int] = []

    def watched(unit: ShardedUnit, start: Callable[[], None]) -> None:
        start()
        together.append(sum(other.bytes_gathered for other in shards.units if other.is_gathered))

    for unit in shards.units:
        unit.start = partial(watched, unit, unit.start)  # type: ignore[method-assign]
    return together


def main() -> int:
    folder, ranks = join(timeout_minutes=5)
    peaks = {}
    for name in ("small", "model"):  # the first round pays for imports and what libraries set up once for such shapes
        for kind in KINDS:
            peaks[kind] = measure(folder / name, kind, ranks.device())
    (folder / f"peaks-{ranks.rank}.json").write_text(json.dumps(peaks))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
