"""How the adapter's gradient on a quantised base lies to that in 32 bits.

    python -m tests.bench.gradient_cosine MODEL TEXTS [--steps N] [--batch N]

MODEL is a folder with real weights, TEXTS a .jsonl of conversations (tests/bench/scu_texts.py makes both). The adapter
takes --steps of AdamW in 32 bits first, since dA is 0 while B is. Then the same texts go once through the same adapter
on the base in bf16, fp8, int8 and NF4: the cosine, layer by layer, of dA and of dB with those in 32 bits. Of fp8 it is
taken apart: `weights` is the base with the weights of fp8, in 32-bit arithmetic, and `fp8 to weights` compares
with that, which leaves what the arithmetic does. Operators are the card's, on a CPU those of plain torch.
"""

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer

from ops.eight_bit import STORAGE
from ops.reference import decode_8bit_values, quantize_rows
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.patches.fused_lora import fuse_layers

KINDS = ("bf16", "fp8", "int8", "nf4")
COLUMNS = (*KINDS, "weights", "fp8 to weights")
LENGTH = 192
LAYER = re.compile(r"layers\.(\d+)\.")


def adapted(folder: Path, kind: str, device: torch.device, ids: Tensor) -> Any:
    """The base in numbers of that kind with an adapter, its layers fused as training has them."""
    dtype = torch.float32 if kind in ("fp32", "weights") else torch.bfloat16
    quantization = QuantizationSection(quant_type=kind) if kind in ("fp8", "int8", "nf4") else None
    model = load_base_model(
        str(folder), ModelSection(), dtype=dtype, device=device, attention="sdpa", quantization=quantization
    )
    if kind == "weights":
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
                values, scale = quantize_rows(layer.weight.detach(), STORAGE["fp8"])
                layer.weight.data = decode_8bit_values(values) * scale[:, None]
    torch.manual_seed(0)
    model = apply_adapter(model.to(device), LoraSection(r=16, alpha=32), dtype)
    fuse_layers(
        model,
        "cuda" if device.type == "cuda" else "reference",
        forward=partial(model, input_ids=ids[:1], use_cache=False),
    )
    return model


def factors(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Of the mean loss over the texts, in 32 bits."""
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: each.grad.detach().float().cpu() for name, each in factors(model).items() if each.grad is not None}


def cosines(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[tuple[int, str], float]:
    """(layer, "A" or "B") -> cosine of the gradients of all its factors of that kind."""
    together: dict[tuple[int, str], list[str]] = {}
    for name in true:
        layer = LAYER.search(name)
        assert layer is not None, name
        together.setdefault((int(layer.group(1)), "A" if "lora_A" in name else "B"), []).append(name)
    found_values, true_values = (
        {key: torch.cat([of[name].flatten() for name in names]) for key, names in together.items()}
        for of in (found, true)
    )
    return {key: float(cosine_similarity(found_values[key], true_values[key], dim=0)) for key in together}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    lines = arguments.texts.read_text().splitlines()
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines[:2000]]
    stream = tokenizer("".join(texts), return_tensors="pt").input_ids[0]
    count = (arguments.steps + 1) * arguments.batch
    rows = stream[: count * LENGTH].view(count, LENGTH).to(device).split(arguments.batch)
    model = adapted(arguments.model, "fp32", device, rows[0])
    optimizer = torch.optim.AdamW(factors(model).values(), lr=5e-4)
    for ids in rows[1:]:
        gradients(model, ids)
        optimizer.step()
    # In bf16 from the start, so that every kind has the same factors.
    state = {name: each.detach().bfloat16() for name, each in factors(model).items()}
    grads = {}
    for kind in ("fp32", *KINDS, "weights"):
        model = adapted(arguments.model, kind, device, rows[0])
        with torch.no_grad():
            for name, each in factors(model).items():
                each.copy_(state[name])
        grads[kind] = gradients(model, rows[0])
        del model
    table = {kind: cosines(grads[kind], grads["fp32"]) for kind in COLUMNS[:-1]}
    table[COLUMNS[-1]] = cosines(grads["fp8"], grads["weights"])
    print(f"{device}, {arguments.steps} steps, {arguments.batch} x {LENGTH} tokens; dA, dB")
    print("| layer | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    layers = sorted({layer for layer, _ in table["bf16"]})
    least = {kind: {side: min(of[layer, side] for layer in layers) for side in "AB"} for kind, of in table.items()}
    by_layer = {
        str(layer): {kind: {side: of[layer, side] for side in "AB"} for kind, of in table.items()} for layer in layers
    }
    for label, row in (by_layer | {"least": least}).items():
        print(f"| {label} | " + " | ".join(f"{of['A']:.3f}, {of['B']:.3f}" for of in row.values()) + " |")


if __name__ == "__main__":
    main()
