"""Random problems for the experts' operator, and their truth by autograd, each pair of a token and an expert alone."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ops import experts, reference
from ops.experts import Activation, ExpertAdapter, ExpertMatrix, ExpertWeights
from ops.seeds import Seeds

ROUTINGS = ("ragged", "even", "one", "skewed", "doubled")


@dataclass
class Problem:
    hidden: Tensor
    index: Tensor
    weights: Tensor
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]
    grad: Tensor
    biases: list[Tensor] = field(default_factory=list)
    gate_up_factors: list[Tensor] = field(default_factory=list)
    down_factors: list[Tensor] = field(default_factory=list)
    activation: Activation = "silu"
    interleaved: bool = False
    transposed: bool = False
    p: float = 0.0
    seed: Tensor | None = None
    scales: tuple[float, float] = (1.7, 0.6)
    alpha: float = 1.702
    limit: float = 1.5  # low enough that values are clamped

    def frozen(self) -> ExpertWeights:
        def matrix(weight: Tensor) -> ExpertMatrix:
            if self.transposed:
                return ExpertMatrix.from_plain(weight.transpose(1, 2).contiguous(), transposed=True)
            return ExpertMatrix.from_plain(weight)

        gate_up_bias, down_bias = self.biases or (None, None)
        return ExpertWeights(
            matrix(self.gate_up),
            matrix(self.down),
            gate_up_bias,
            down_bias,
            self.activation,
            self.interleaved,
            self.alpha,
            self.limit,
        )

    def adapter(self) -> ExpertAdapter:
        a_gu, b_gu = self.gate_up_factors or (None, None)
        a_d, b_d = self.down_factors or (None, None)
        return ExpertAdapter(a_gu, b_gu, a_d, b_d, *self.scales, self.p)

    def trained(self) -> dict[str, Tensor]:
        """The tensors that get gradients, by name."""
        named = {"hidden": self.hidden, "weights": self.weights}
        for matrix, factors in (("gate_up", self.gate_up_factors), ("down", self.down_factors)):
            named |= {f"{matrix}.{name}": factor for name, factor in zip("AB", factors, strict=False)}
        return named

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Problem":
        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.detach().to(device, dtype if value.is_floating_point() else value.dtype)
            return [move(item) for item in value] if isinstance(value, list) else value

        return replace(self, **{name: move(value) for name, value in vars(self).items()})


def route(routing: str, T: int, K: int, E: int, generator: torch.Generator) -> Tensor:
    """index[T,K]: a router's top K; all on one expert; an eighth of the experts with half the tokens; K times one."""
    if routing == "one":
        return torch.full((T, K), E // 2)
    if routing == "even":
        return (torch.arange(T * K).view(T, K) * 7) % E
    if routing == "doubled":  # the same expert for all of a token's pairs
        return torch.randint(0, E, (T, 1), generator=generator).repeat(1, K)
    scores = torch.randn(T, E, generator=generator)
    if routing == "skewed":
        scores[: T // 2, : max(E // 8, 1)] += 100
    else:
        scores[:, E - 1] -= 100  # an expert without tokens
    return scores.topk(K, dim=-1).indices


def make(
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,  # noqa: E741
    rank: int,
    dtype: torch.dtype = torch.float64,
    routing: str = "ragged",
    bias: bool = False,
    adapted: str = "both",
    seed: int = 0,
    **more: object,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype)

    index = route(routing, T, K, E, generator)
    problem = Problem(
        hidden=normal(T, H),
        index=index,
        weights=torch.rand(T, K, generator=generator, dtype=torch.float64).to(dtype),
        gate_up=normal(E, 2 * I, H, size=H**-0.5),
        down=normal(E, H, I, size=I**-0.5),
        grad=normal(T, H),
        **more,  # type: ignore[arg-type]
    )
    if bias:
        problem.biases = [normal(E, 2 * I), normal(E, H)]
    if adapted in ("both", "gate_up"):
        problem.gate_up_factors = [normal(E, rank, H, size=H**-0.5), normal(E, 2 * I, rank, size=rank**-0.5)]
    if adapted in ("both", "down"):
        problem.down_factors = [normal(E, rank, I, size=I**-0.5), normal(E, H, rank, size=rank**-0.5)]
    if problem.p > 0:
        problem.seed = torch.tensor([1234567890123 + seed, 987654321 + seed])
    return problem


def draw_packed(storage: str, shape: tuple[int, int, int], generator: torch.Generator) -> ExpertMatrix:
    """A random matrix of every expert [E, rows, cols] as "nf4", "nested" (double-quantised NF4) or "mxfp4"."""
    E, rows, cols = shape

    def bytes_of(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    if storage == "mxfp4":
        # Values up to 6 / 64, from scales that differ.
        return ExpertMatrix.from_mxfp4(
            bytes_of(E, rows, cols // 32, 16), bytes_of(E, rows, cols // 32, low=118, high=122)
        )
    blocks, code = rows * cols // 64, torch.linspace(-1, 1, 16)
    state = [torch.rand(E, blocks, generator=generator) * 0.1, code]
    if storage == "nested":
        nested = torch.rand(E, -(-blocks // 64), generator=generator) * 0.1
        offset = torch.rand(E, generator=generator) * 0.1
        state = [bytes_of(E, blocks), code, nested, torch.linspace(-1, 1, 256), offset]
    return ExpertMatrix.from_nf4(bytes_of(E, rows * cols // 2), state, rows, cols, 64, 64)


def moved(matrix: ExpertMatrix, device: str) -> ExpertMatrix:
    """The matrix with its tensors on another device."""
    return replace(matrix, tensors=tuple(tensor.to(device) for tensor in matrix.tensors))


def truth(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """y and the gradients in float64 by autograd, nothing sorted and nothing grouped."""
    wide = problem.to(torch.float64)
    for tensor in wide.trained().values():
        tensor.requires_grad_()
    T, K = wide.index.shape
    E, H, I = wide.down.shape  # noqa: E741
    inside = ((wide.index >= 0) & (wide.index < E)).reshape(-1)
    expert = wide.index.reshape(-1).clamp(0, E - 1)
    x = wide.hidden.repeat_interleave(K, 0)
    masks = [
        1.0
        if wide.seed is None
        else reference.build_dropout_mask(wide.seed[i : i + 1], T * K, width, wide.p, torch.float64)
        for i, width in enumerate((H, I))
    ]

    def adapted(x: Tensor, weight: Tensor, factors: list[Tensor], scale: float, mask: Tensor | float) -> Tensor:
        y = torch.einsum("ni,noi->no", x, weight[expert])
        if not factors:
            return y
        h = torch.einsum("ni,nri->nr", x * mask, factors[0][expert])
        return y + scale * torch.einsum("nr,nor->no", h, factors[1][expert])

    u = adapted(x, wide.gate_up, wide.gate_up_factors, wide.scales[0], masks[0])
    if wide.biases:
        u = u + wide.biases[0][expert]
    gate, up = (u[:, ::2], u[:, 1::2]) if wide.interleaved else u.chunk(2, -1)
    if wide.activation == "clamped":
        gate, up = gate.clamp(max=wide.limit), up.clamp(-wide.limit, wide.limit)
        act = (up + 1) * gate * torch.sigmoid(gate * wide.alpha)
    elif wide.activation == "silu":
        act = torch.nn.functional.silu(gate) * up
    else:
        act = torch.nn.functional.gelu(gate, approximate="tanh" if "tanh" in wide.activation else "none") * up
    out = adapted(act, wide.down, wide.down_factors, wide.scales[1], masks[1])
    if wide.biases:
        out = out + wide.biases[1][expert]
    out = torch.where(inside[:, None], out * wide.weights.reshape(-1, 1), 0.0)
    y = out.view(T, K, H).sum(1)
    grads = torch.autograd.grad(y, list(wide.trained().values()), wide.grad, allow_unused=True)
    named = zip(wide.trained().items(), grads, strict=True)
    return y.detach(), {name: torch.zeros_like(t) if grad is None else grad for (name, t), grad in named}


def run(problem: Problem, frozen: ExpertWeights | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return y and the operator's gradients with the problem's seeds."""
    trained = problem.trained()
    for tensor in trained.values():
        tensor.requires_grad_()
    seeds = Seeds()
    if problem.seed is not None:
        seeds._drawn.append(problem.seed)
    args = problem.hidden, problem.index, problem.weights, frozen or problem.frozen(), problem.adapter()
    with seeds.replay():
        y = experts.experts_mlp(*args)
    grads = torch.autograd.grad(y, list(trained.values()), problem.grad)
    return y.detach(), dict(zip(trained, grads, strict=True))
