"""Lower bound of a step: the time this card needs for the operations that no LoRA trainer can avoid.

`python -m benchmarks.bench.floor BASE_MODEL --batch-size B --length L --rank R [--recompute SHARE]` prints one JSON
line of milliseconds by category. Products and attention are timed one by one on this card; norms, activations, rotary
embedding and the adapter are the bytes that they must move divided by the bandwidth of a copy:

norms        2 per layer: read and write forward; read x, dY and write dX backward
activation   SwiGLU: read 2, write 1 forward; read 3, write 2 backward; rotary: read and write q, k both ways
adapter      X of every group of shared-input projections and dY of every layer read once
head         logits and their gradient as products, and one pass over the logits
experts      grouped products of K rows per token, sorted by expert, equal numbers for all; the gate as above
             for each row; "norms" includes the weighted sum and that of dX, "adapter" the sorted copies of x and dY,
             which its kernels make: K + 1 times H per token each

Recomputation adds the forward pass of every layer. Dequantization is not included: a product may read 4 bits directly.
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.bench.trace import ADAPTER, ATTENTION, FROZEN, HEAD, NORMS
from trainer.config import CommandParser, ModelSection, UserError
from trainer.model.base import build_empty_model, load_model_config
from trainer.model.expert_layers import (
    DOWN,
    GATE_UP,
    count_experts_per_token,
    find_expert_modules,
    get_expert_shape,
    get_expert_width,
    is_transposed,
    list_expert_tensors,
    takes_all_tokens,
)
from trainer.monitor.mfu import is_attention

# Shared-input projections are one product here.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
COPY_BYTES = 2**30
Product = tuple[int, int]  # in, out


class Experts(NamedTuple):
    """The experts of a layer: their number, experts per token, H, I, and whether they have a gate."""

    number: int
    visited: int
    hidden: int
    width: int
    gated: bool

    def products(self) -> tuple[Product, Product]:
        """Shapes of the products into an expert and out of it."""
        return (self.hidden, (2 if self.gated else 1) * self.width), (self.width, self.hidden)

    @property
    def between(self) -> int:
        """Elements per token that the two products write and read between them: u[.., 2I] and the activation."""
        return self.visited * (self.products()[0][1] + self.width)

    @property
    def sorted(self) -> int:
        """Elements per token for a copy of its hidden state to every visited expert, or the sum of their outputs."""
        return (self.visited + 1) * self.hidden


def measure_floor(
    base_model: str, *, batch_size: int, length: int, rank: int, recompute: float, device: torch.device
) -> dict[str, float]:
    """Return the milliseconds by category for a step of batch_size x length tokens; their sum is the floor.

    `recompute` is the fraction of layers that are recomputed.
    """
    config = load_model_config(base_model, ModelSection())
    text, model = config.get_text_config(), build_empty_model(config, ModelSection())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, hidden, vocabulary = batch_size * length, text.hidden_size, text.vocab_size
    repeats = 10 if device.type == "cuda" else 2
    products, experts = _products(model), _experts(model)
    per_byte = _milliseconds_per_byte(device, repeats)
    width = torch.empty((), dtype=dtype).element_size()

    forward = backward = 0.0
    for (fan_in, fan_out), count in products.items():
        one, other = _time_product(tokens, fan_in, fan_out, dtype, device, repeats)
        forward, backward = forward + count * one, backward + count * other
    for layer, count in experts.items():
        for product in layer.products():
            one, other = _time_grouped(tokens, layer, product, dtype, device, repeats)
            forward, backward = forward + count * one, backward + count * other
    layers, attention, attention_back = _attention_layers(model), 0.0, 0.0
    if layers:
        attention, attention_back = _time_attention(text, batch_size, length, dtype, device, repeats)
    passes = _passes(model, text, experts)
    moved = sum(count * (fan_in + fan_out) for (fan_in, fan_out), count in products.items())
    moved += sum(count * (2 * layer.hidden + layer.between) for layer, count in experts.items())
    copied = sum(count * layer.sorted for layer, count in experts.items())
    head, head_back = _time_product(tokens, hidden, vocabulary, dtype, device, repeats)
    again = 1.0 + recompute
    return {
        FROZEN: again * forward + backward,
        ATTENTION: layers * (again * attention + attention_back),
        ADAPTER: ((moved if rank else 0) + (again + 1.0) * copied) * tokens * width * per_byte,
        NORMS: (again * passes[0] + passes[1]) * tokens * width * per_byte,
        HEAD: head + head_back + 2 * tokens * vocabulary * width * per_byte,
    }


def _products(model: nn.Module) -> Counter[Product]:
    """Count the frozen products by shape, with the projections of a group joined and without the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    products: Counter[Product] = Counter()
    for parent in model.modules():
        linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in SIBLINGS:
            if set(names) <= linears.keys():
                joined = [linears.pop(name) for name in names]
                products[joined[0].in_features, sum(child.out_features for child in joined)] += 1
        for child in linears.values():
            if child is not head:
                products[child.in_features, child.out_features] += 1
    return products


def _experts(model: nn.Module) -> Counter[Experts]:
    """Count the MoE layers by shape; those of Llama 4 give all tokens to all experts."""
    found: Counter[Experts] = Counter()
    for module in find_expert_modules(model).values():
        number, *matrix = get_expert_shape(module, DOWN)
        hidden = matrix[-1 if is_transposed(module) else 0]
        visited = number if takes_all_tokens(module) else count_experts_per_token(model.config)
        found[Experts(number, visited, hidden, get_expert_width(module), GATE_UP in list_expert_tensors(module))] += 1
    return found


def _attention_layers(model: nn.Module) -> int:
    return sum(is_attention(module) for module in model.modules())


def _passes(model: nn.Module, text: Any, experts: Counter[Experts]) -> tuple[float, float]:
    """Return the elements per token that norms, activations, experts' sums and rotary embedding move, per direction."""
    norms = sum("Norm" in type(module).__name__ for module in model.modules())
    sums = sum(count * layer.sorted for layer, count in experts.items())
    gates = [layer.visited * layer.width * count for layer, count in experts.items() if layer.gated]
    gates += [m.in_features for name, m in model.named_modules() if name.endswith(("down_proj", "output_linear"))]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotary = _attention_layers(model) * 2 * head_dim * (text.num_attention_heads + text.num_key_value_heads)
    forward = norms * 2 * text.hidden_size + 3 * sum(gates) + rotary + sums
    return float(forward), float(norms * 3 * text.hidden_size + 5 * sum(gates) + rotary + sums)


def _time_product(
    tokens: int, fan_in: int, fan_out: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> tuple[float, float]:
    """Return the milliseconds of x[T,I] W^T and dY[T,O] W."""
    x, grad_y = (_drawn(tokens, size, dtype=dtype, device=device) for size in (fan_in, fan_out))
    weight = _drawn(fan_out, fan_in, dtype=dtype, device=device) * 0.02
    forward = _median(lambda: torch.mm(x, weight.t()), device, repeats)
    return forward, _median(lambda: torch.mm(grad_y, weight), device, repeats)


def _time_grouped(
    tokens: int, experts: Experts, product: Product, dtype: torch.dtype, device: torch.device, repeats: int
) -> tuple[float, float]:
    """Time the same for rows sorted by expert: torch's grouped product if available, else one product per expert."""
    rows, number, (fan_in, fan_out) = tokens * experts.visited, experts.number, product
    x, grad_y = (_drawn(rows, size, dtype=dtype, device=device) for size in product)
    weight = _drawn(number, fan_out, fan_in, dtype=dtype, device=device).mul_(0.02)
    ends = [rows * (expert + 1) // number for expert in range(number)]
    on_card = torch.tensor(ends, dtype=torch.int32, device=device)
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        grouped = None

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        if grouped is not None:
            return grouped(left, right, offs=on_card)
        for matrix, begin, end in zip(right, [0, *ends], ends, strict=False):
            torch.mm(left[begin:end], matrix)
        return None

    forward = _median(lambda: multiply(x, weight.transpose(1, 2)), device, repeats)
    return forward, _median(lambda: multiply(grad_y, weight), device, repeats)


def _time_attention(
    text: Any, batch_size: int, length: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> tuple[float, float]:
    """Return the milliseconds of causal attention of one layer, forward and backward, with the kernel torch picks."""
    heads, groups = text.num_attention_heads, text.num_key_value_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    shape = (batch_size, heads, length, head_dim)
    query, key, value = (
        _drawn(batch_size, count, length, head_dim, dtype=dtype, device=device).requires_grad_()
        for count in (heads, groups, groups)
    )
    grad = _drawn(*shape, dtype=dtype, device=device)

    def forward() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != groups)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), grad)

    one = _median(forward, device, repeats)
    return one, max(0.0, _median(both, device, repeats) - one)


def _milliseconds_per_byte(device: torch.device, repeats: int) -> float:
    """Time a large copy, counting bytes read and bytes written."""
    count = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 64
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median(lambda: target.copy_(source), device, repeats) / (2 * count)


def _drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def _median(operation: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the milliseconds of one call; the first three are left out."""
    times: list[float] = []
    for _ in range(3 + repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            operation()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            operation()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[3:])


def main(argv: list[str] | None = None) -> int:
    """Print the floor of a shape on this machine's first GPU, or its CPU, as one JSON line."""
    parser = CommandParser(prog="benchmarks.bench.floor", description="The floor of a LoRA step on this card.")
    parser.add_argument("base_model", help="random:SHAPE, or a model")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--recompute", type=float, default=0.0, help="fraction of the layers that are recomputed")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        floor = measure_floor(
            arguments.base_model,
            batch_size=arguments.batch_size,
            length=arguments.length,
            rank=arguments.rank,
            recompute=arguments.recompute,
            device=device,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(floor))
    return 0


if __name__ == "__main__":
    sys.exit(main())
