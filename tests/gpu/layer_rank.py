"""One rank of test_layer_shards.py: forward and backward of a few layers of Llama-3.1-8B, whole and gathered per layer.

deepspeed --module tests.gpu.layer_rank OUT.json      prints a line for each base; no engine and no optimizer take part
"""

import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.rank_program import join
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.data.batches import MicroBatch
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.ranks.group import exit_process, leave_process_group
from trainer.patches.fused_lora import fuse_layers
from trainer.patches.loss_head import TokenLoss

BASE = "random:llama3.1-8b,num_hidden_layers=8"
ROWS, LENGTH = 4, 2048
WARM, STEPS = 3, 6


def measure(quantization: QuantizationSection | None, shards: LayerShards | None, device: torch.device) -> Any:
    """Step ms (median), ms of a step that wait for gathers, GiB at the peak of loading and of steps, losses, sizes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "attention": "sdpa", "quantization": quantization}
    model = load_base_model(BASE, ModelSection(), shards=shards, **how)
    load_peak = torch.cuda.max_memory_allocated() - before
    torch.manual_seed(0)
    model = apply_adapter(model, LoraSection(), torch.bfloat16)
    if shards is not None:
        shards.attach(model)
    fuse_layers(model, "auto", forward=lambda: model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device)))
    held = torch.cuda.memory_allocated() - before
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1000, (ROWS, LENGTH), generator=generator)
    batch = MicroBatch(ids, ids.roll(-1, 1), ids.numel(), attention_mask=torch.ones_like(ids))
    loss_of, times, losses = TokenLoss(model), [], []
    waits: list[Any] = []
    torch.cuda.reset_peak_memory_stats()
    for step in range(WARM + STEPS):
        if step == WARM and shards is not None:
            shards.time_waits(partial(timed, waits))
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = loss_of(model, batch, device)
        loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        losses.append(float(loss) / ids.numel())
    figures = {
        "step_ms": 1e3 * statistics.median(times[WARM:]),
        "wait_ms": sum(before.elapsed_time(after) for before, after in waits) / STEPS,
        "load_peak": load_peak,
        "held": held,
        "step_peak": torch.cuda.max_memory_allocated() - before,
        "losses": losses,
        "units": [] if shards is None else [unit.bytes_gathered for unit in shards.units],
        "share": 0 if shards is None else sum(unit.bytes_held for unit in shards.units),
    }
    for unit in shards.units if shards is not None else ():
        unit.free()  # NCCL keeps the memory of a gather that nobody has waited for, and the next model would count it
    return figures


@contextmanager
def timed(waits: list[Any]) -> Iterator[None]:
    """Adds the pair of CUDA events around the block to the list."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    yield
    after.record()
    waits.append((before, after))


def main() -> int:
    out, ranks = join(timeout_minutes=10)
    device, found = ranks.device(), {}
    for kind, quantization in (("bf16", None), ("nf4", QuantizationSection())):
        for gather in ("whole", "layer"):
            # Alone, a rank has nothing to share: what it gathers is on its host.
            shards = LayerShards(device, in_host_memory=ranks.world_size == 1) if gather == "layer" else None
            figures = found[f"{kind}-{gather}"] = measure(quantization, shards, device)
            if ranks.is_main:
                print(
                    f"{kind} {gather:<6} {ranks.world_size} GPUs: {figures['step_ms']:7.2f} ms per step, including "
                    f"waiting for gathers {figures['wait_ms']:6.2f}; GiB: held {figures['held'] / 2**30:.2f}, peak of "
                    f"loading {figures['load_peak'] / 2**30:.2f}, of a step {figures['step_peak'] / 2**30:.2f}",
                    flush=True,
                )
    (out.parent / f"{out.stem}-{ranks.rank}.json").write_text(json.dumps(found))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
