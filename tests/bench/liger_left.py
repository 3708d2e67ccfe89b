"""Norms, gated MLPs and rotary embedding by our operators, by Liger and by plain torch: time and memory.

python -m tests.bench.liger_left [CASE ...]        a table comes last

Forward and backward of a few layers with random weights, bf16, a line for each case and for who computes what it names.
`adapter`: LoRA r=16 on every linear layer, as the product computes it; `full`: all weights are trained, those
of norms as well. Liger's functions replace some of transformers' for the process: it comes last of each model.
"""

import gc
import statistics
import sys
import time

import torch

import ops
from trainer.config import LoraSection, ModelSection
from trainer.data import MicroBatch
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.patches import norm_mlp_rope
from trainer.patches.fused_lora import fuse
from trainer.patches.liger import PARTS, apply_liger
from trainer.patches.loss_head import TokenLoss
from trainer.patches.norm_mlp_rope import forget_inputs, replace_elementwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = (
    "random:gemma2-2b,num_hidden_layers=6 adapter",
    "random:llama3.1-8b,num_hidden_layers=2 full",
    "random:gemma2-2b,num_hidden_layers=4 full",
)
WHO = ("ours", "torch", "liger")
ROWS, LENGTH = (4, 2048) if DEVICE.type == "cuda" else (1, 32)
WARM, STEPS = (3, 12) if DEVICE.type == "cuda" else (1, 1)


def measure(base: str, adapter: bool, who: str) -> tuple[str, float, float]:
    """What is not ours, the median step in ms, and the peak of a step in GiB above what is held before it.

    `who` computes what our operators do not, and gated MLPs unless it is `ours`.
    """
    gc.collect()
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(0)
    attention = "eager" if "gemma2" in base else "sdpa"  # as the product has it: Gemma 2 caps its scores
    model = load_base_model(base, ModelSection(), dtype=dtype, device=DEVICE, attention=attention)
    ours = norm_mlp_rope._mlp_forward
    if adapter and who != "ours":
        norm_mlp_rope._mlp_forward = lambda *_: "left to others"
    replaced = replace_elementwise(
        model, frozen_norms=adapter or who == "ours", recompute=adapter, recompute_norms=adapter
    )
    norm_mlp_rope._mlp_forward = ours
    left = [PARTS[part] for part in PARTS if part not in replaced.whole()]
    if who == "liger" and left:
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
    print("operators:", ops.load("auto").name)
    lines = [f"{'case':<44}{'who':<7}{'not ours':<32}{'ms':>9}{'GiB':>8}"]
    for case in cases:
        base, _, kind = case.partition(" ")
        for who in WHO:
            try:
                left, milliseconds, memory = measure(base, kind == "adapter", who)
                line = f"{left:<32}{milliseconds:>9.2f}{memory:>8.2f}"
            except Exception as error:  # the other cases are still of use
                line = f"{type(error).__name__}: {str(error)[:200]}"
            lines.append(f"{case.removeprefix('random:'):<44}{who:<7}{line}")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CASES)))
