"""Time and memory per layer of long sequences: tiles, kept attention and inputs in host memory, each against without.

    python3 -m tests.bench.long_context [--lengths 8192,65536,131072] [--layers 4] [--shape llama3.1-8b] [--device cuda]

An NF4 base with random weights, an adapter of rank 16, and a random function of the last hidden state as loss.
Layers are recomputed. The last column is the distance of the adapter's gradient from that of the first row of its
length.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from trainer.config import LoraSection, ModelSection, QuantizationSection, TrainingSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.parallel.engine.flat_adapter import flatten_adapter
from trainer.patches.fused_lora import fuse_layers
from trainer.patches.norm_mlp_rope import replace_elementwise
from trainer.patches.packed_attention import enable_varlen
from trainer.patches.recompute import disable_recomputation, enable_recomputation
from trainer.patches.tiled_mlp import tile_feed_forward

VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "tiles": {"tiled_mlp": 8192},
    "tiles, host": {"tiled_mlp": 8192, "offload_activations": True},
    "tiles, host, attention kept": {"tiled_mlp": 8192, "offload_activations": True, "recompute_attention": False},
    "tiles, attention kept": {"tiled_mlp": 8192, "recompute_attention": False},
}


def build(shape: str, layers: int, device: torch.device, training: dict[str, Any]) -> Any:
    """Build the model with the patches of a run."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = f"random:{shape},num_hidden_layers={layers}"
    four_bits = QuantizationSection()
    model = load_base_model(name, ModelSection(), dtype=dtype, device=device, attention="sdpa", quantization=four_bits)
    enable_varlen(model)
    if device.type == "cuda":
        replace_elementwise(model)
    torch.manual_seed(0)
    model = apply_adapter(model, LoraSection(), dtype).train()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.02)
    flatten_adapter(model, separate_up=False)
    ids = torch.ones(1, 8, dtype=torch.long, device=device)
    fuse_layers(model, "auto", forward=lambda: model(input_ids=ids, use_cache=False), tokens=8192)
    if tile := training.get("tiled_mlp"):
        tile_feed_forward(model, tile)
    enable_recomputation(model, TrainingSection.model_validate({"gradient_checkpointing": True} | training))
    return model


def one_pass(model: Any, length: int, documents: int = 1) -> torch.Tensor:
    """Return the gradient of the adapter after one forward and backward pass."""
    device = next(model.parameters()).device
    ids = torch.randint(1, 250, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    each = length // documents
    bounds = torch.arange(0, length + 1, each, dtype=torch.int32, device=device)
    positions = torch.arange(length, device=device)[None] % each
    model.zero_grad()
    model.flat_adapter.create_weight_views()  # the inner model below is called without its hooks
    packs = {"cu_seqlens": bounds, "max_seqlen": each, "position_ids": positions}
    inner = model.get_base_model().model
    hidden = inner(input_ids=ids, use_cache=False, **packs).last_hidden_state.float()
    # Not its square: a normalized state has the same sum of squares for any adapter.
    noise = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(2)).to(device)
    (hidden @ noise).tanh().mean().backward()
    gradient: torch.Tensor = model.flat_adapter.buffers[0].grad
    return gradient


def measure(model: Any, length: int, device: torch.device, passes: int) -> tuple[float, float, torch.Tensor]:
    """Return the seconds of the fastest pass, its peak GiB, and the gradient."""
    on_gpu = device.type == "cuda"
    times = []
    for _ in range(passes):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        gradient = one_pass(model, length)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0, gradient


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each length and variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="8192,65536,131072")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {options.shape}, {options.layers} layers")
    print(f"{'tokens':>8} {'variant':<28} {'ms per layer':>12} {'peak GiB':>9} {'gradient off by':>16}")
    first: dict[int, torch.Tensor] = {}
    for variant, training in VARIANTS.items():
        model = build(options.shape, options.layers, device, training)
        for length in map(int, options.lengths.split(",")):
            try:
                seconds, peak, gradient = measure(model, length, device, options.passes)
            except torch.cuda.OutOfMemoryError:
                print(f"{length:>8} {variant:<28} {'out of memory':>12}")
                continue
            known = first.setdefault(length, gradient.float().cpu())
            off = float((gradient.float().cpu() - known).norm() / known.norm())
            each = 1000 * seconds / options.layers
            print(f"{length:>8} {variant:<28} {each:>12.1f} {peak:>9.2f} {off:>16.1e}", flush=True)
        disable_recomputation(model)
        del model


if __name__ == "__main__":
    main()
