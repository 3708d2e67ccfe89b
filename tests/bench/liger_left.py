"""What Liger still gives beside our own norms, SwiGLU and rotary embedding: time and memory without it and with it.

python -m tests.bench.liger_left [BASE ...]        a table comes last

Forward and backward of a few layers with random weights, bf16. `adapter`: LoRA r=16 on every linear layer, as the
product computes it; `full`: all weights are trained, so that norms are not ours. Liger's functions replace some of
transformers' for the process: of each model the run without it comes first.
"""

import gc
import statistics
import sys
import time

import torch

from trainer.config import LoraSection, ModelSection
from trainer.data import MicroBatch
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.patches.fused_lora import fuse
from trainer.patches.liger import PARTS, apply_liger
from trainer.patches.loss_head import TokenLoss
from trainer.patches.norm_mlp_rope import forget_inputs, replace_elementwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = (
    "random:llama3.1-8b,num_hidden_layers=2 adapter",
    "random:gemma2-2b,num_hidden_layers=4 adapter",
    "random:llama3.1-8b,num_hidden_layers=2 full",
    "random:gemma2-2b,num_hidden_layers=4 full",
)
ROWS, LENGTH = (4, 2048) if DEVICE.type == "cuda" else (1, 32)
WARM, STEPS = (3, 12) if DEVICE.type == "cuda" else (1, 1)


def measure(base: str, adapter: bool, liger: bool) -> tuple[str, float, float]:
    """What is not ours, the median step in ms, and the peak of a step in GiB above what is held before it."""
    gc.collect()
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = load_base_model(base, ModelSection(), dtype=dtype, device=DEVICE, attention="sdpa")
    replaced = replace_elementwise(model, frozen_norms=adapter, recompute=adapter, recompute_norms=adapter)
    left = [PARTS[part] for part in PARTS if part not in replaced.whole()]
    if liger and left:
        apply_liger(model, replaced.whole())
    if adapter:
        model = apply_adapter(model, LoraSection(), dtype)
        few = torch.zeros(1, 8, dtype=torch.long, device=DEVICE)
        fuse(model, "auto", forward=lambda: model(input_ids=few, use_cache=False))
        forget_inputs(model)
    model.train()
    ids = torch.randint(0, 300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(ids, ids.roll(-1, 1), ids.numel())
    loss_of, times = TokenLoss(model), []
    for step in range(WARM + STEPS):
        model.zero_grad(set_to_none=True)
        if step == WARM and DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        _wait()
        started = time.perf_counter()
        loss_of(model, batch, DEVICE).backward()
        _wait()
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() - held if DEVICE.type == "cuda" else 0
    return ", ".join(left) or "nothing", statistics.median(times[WARM:]), peak / 2**30


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main(cases: list[str]) -> int:
    """Measure the cases, each named `BASE adapter` or `BASE full`."""
    lines = [f"{'case':<50}{'not ours':<36}{'without':>9}{'Liger':>9}{'':>7}   {'without':>8}{'Liger':>7}"]
    lines += [f"{'':<86}{'ms':>9}{'ms':>9}{'':>7}   {'GiB':>8}{'GiB':>7}"]
    for case in cases:
        base, _, kind = case.partition(" ")
        try:
            left, without, memory = measure(base, kind == "adapter", False)
            print(f"{case}: not ours: {left}; without Liger {without:.2f} ms, {memory:.2f} GiB", flush=True)
            _, with_it, memory_with = measure(base, kind == "adapter", True)
        except Exception as error:  # the other cases are still of use
            lines.append(f"{case:<50}{type(error).__name__}: {str(error)[:200]}")
            continue
        figures = f"{without:>9.2f}{with_it:>9.2f}{with_it / without - 1:>+7.1%}   {memory:>8.2f}{memory_with:>7.2f}"
        lines.append(f"{case.removeprefix('random:'):<50}{left:<36}{figures}")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CASES)))
