"""Our RMSNorm, SwiGLU, GeGLU and rotary embedding in place of a loaded model's own.

Modules that compute these are found by observation, not from a list of architectures: a copy of the module runs on
random data with random weights and dummy projections. Its values and gradients must agree with our operator's to a
rounding or two; otherwise the module keeps its own forward, and the reason is printed.

With `recompute`, results carry the function that recomputes them, and the adapted layers that read them keep this
function instead of the result (`ops.elementwise.recomputing`).
"""

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ops.elementwise import gelu_mul, recomputing, rms_norm, rope, silu_mul
from trainer.contract.known_versions import replaces
from trainer.parallel.engine.partitioned import whole_shape
from trainer.patches.replace import replace

PARTS = {"rms_norm": "norms", "swiglu": "activation", "rope": "rotary embedding"}
ROTARY = "apply_rotary_pos_emb"
RECOMPUTE_FROM_BYTES = 2**23
"""Minimum bytes of a result for which recomputing is worth the host time of the hooks: 1,024 x 4,096 in 16 bits."""
_RECOMPUTE = "_zerolora_recompute"
_ALLOWED = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative, root mean square
_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
Forward = Callable[..., Any]
Gated = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Replaceable:
    """Forwards of modules and functions of modeling files that our operators can replace, and why not the others."""

    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    functions: list[tuple[Any, Forward]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    @property
    def norms(self) -> int:
        """Number of norms that use our operator."""
        return sum(_is_norm(type(module).__name__) for module, _ in self.forwards)

    @property
    def mlps(self) -> int:
        """Number of gated MLPs that use our operator."""
        return len(self.forwards) - self.norms

    def lines(self) -> list[str]:
        """Return the lines for the console."""
        found = f"{self.norms} norms, {self.mlps} gated MLPs, {'' if self.functions else 'no '}rotary embedding"
        counts = Counter(self.refused)
        return [f"element-wise operators: {found}"] + [
            f"  the model's own: {count} x {name}: {reason}" for (name, reason), count in counts.items()
        ]

    def why_not(self) -> dict[str, str]:
        """Return for each of PARTS why it is not replaced in the whole model; empty if it is."""
        parts = {"rms_norm": self.norms, "swiglu": self.mlps, "rope": len(self.functions)}
        reasons = {part: "" if count else "the model has none of a known form" for part, count in parts.items()}
        for name, reason in self.refused:
            reasons["rms_norm" if _is_norm(name) else "rope" if name == ROTARY else "swiglu"] = f"{name}: {reason}"
        return reasons


def examine_elementwise(model: nn.Module, *, frozen_norms: bool = True, recompute: str = "none") -> Replaceable:
    """Find what our operators can replace in a loaded or an empty model, without changing it."""
    examined = Replaceable()
    verdicts: dict[Any, Forward | str] = {}
    for module in model.modules():
        name = type(module).__name__
        is_norm = _is_norm(name)
        if not is_norm and _projections(module) is None:
            continue
        key = _kind(module)
        if key not in verdicts:
            if is_norm:
                verdicts[key] = _norm_forward(module, recompute == "norms")
            else:
                verdicts[key] = _mlp_forward(module, recompute != "none")
        verdict = "its weight is trained" if is_norm and not frozen_norms else verdicts[key]
        if isinstance(verdict, str):
            examined.refused.append((name, verdict))
        else:
            examined.forwards.append((module, verdict))
    like = next(model.parameters())
    for namespace in {sys.modules[type(module).__module__] for module in model.modules()}:
        if callable(getattr(namespace, ROTARY, None)):
            verdict = _rotary(getattr(namespace, ROTARY), like)
            if isinstance(verdict, str):
                examined.refused.append((ROTARY, verdict))
            else:
                examined.functions.append((namespace, verdict))
    return examined


@replaces("the forward of RMSNorm and gated MLPs, and `apply_rotary_pos_emb`")
def replace_elementwise(model: nn.Module, *, frozen_norms: bool = True, recompute: str = "none") -> Replaceable:
    """Replace norms, gated MLPs and rotary embedding by our operators where they agree with the model's own code.

    Call it before adapters are added. Trained norms (not `frozen_norms`) stay the model's own. `recompute` lets layers
    recompute the outputs of gated MLPs (`activations`), also of norms (`norms`), or neither (`none`).
    """
    examined = examine_elementwise(model, frozen_norms=frozen_norms, recompute=recompute)
    for module, forward in examined.forwards:
        # A bound method follows its module when PEFT copies it; a closure would keep the old weights.
        replace(module, "forward", MethodType(forward, module))
    for namespace, function in examined.functions:
        replace(namespace, ROTARY, function)
    return examined


@replaces("the forward of adapted layers, to recompute their inputs")
def recompute_inputs(model: nn.Module, but: Sequence[nn.Module] = ()) -> int:
    """Make adapted layers, except those within `but`, recompute inputs instead of keeping them; return their number."""
    from peft.tuners.lora import LoraLayer

    left = {module for part in but for module in part.modules()}
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer) and module not in left]
    for layer in layers:
        replace(layer, "forward", partial(_forward_recomputing, layer.forward))
    return len(layers)


def _forward_recomputing(inner: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    recompute = getattr(x, _RECOMPUTE, None)
    if recompute is None:
        return inner(x, *args, **kwargs)
    with recomputing(x, recompute):
        return inner(x, *args, **kwargs)


def _should_recompute(result: Tensor) -> bool:
    return result.requires_grad and result.numel() * result.element_size() >= RECOMPUTE_FROM_BYTES


def _is_norm(name: str) -> bool:
    return name.endswith("RMSNorm")


def _projections(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of a gated MLP's projections, the output projection last; None for other modules."""
    for names in (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")):
        if all(isinstance(module._modules.get(name), nn.Module) for name in names):
            return names
    return None


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module is a gated MLP that takes nothing but its input."""
    if _projections(module) is None:
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Return a key shared by modules that differ only in the values of their weights."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    children = tuple(type(child) for child in module.children())
    weights = tuple((weight.dtype, weight.shape, weight.device) for weight in module.parameters(recurse=False))
    return type(module), tuple(settings.items()), children, weights, "forward" in vars(module)


def _norm_forward(module: nn.Module, recompute: bool) -> Forward | str:
    plain, weight = type(module).forward, getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "forward" in vars(module):
        return "its forward has been replaced already"
    if list(inspect.signature(plain).parameters)[2:] or [name for name, _ in module.named_parameters()] != ["weight"]:
        return "it takes more than its input and one weight"
    if eps is None or weight is None:
        return "it has no epsilon of a known name"
    reason = ""
    for offset in (0.0, 1.0):
        reason = _test_norm(module, weight, float(eps), offset)
        if not reason:
            return _norm_method(plain, float(eps), offset, recompute)
    return reason


def _norm_method(plain: Forward, eps: float, offset: float, recompute: bool) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype or weight.requires_grad:
            result: Tensor = plain(self, x)
            return result
        y = rms_norm(x, weight, eps, offset)
        if recompute and _should_recompute(y):
            setattr(y, _RECOMPUTE, partial(rms_norm, x, weight, eps, offset))
        return y

    return forward


def _test_norm(module: nn.Module, weight: Tensor, eps: float, offset: float) -> str:
    width = (whole_shape(weight) or [0])[0] or 64  # a partitioned weight may lack its shape
    twin = copy.copy(module)

    def run(draw: Draw) -> tuple[Tensor, Tensor, list[Tensor]]:
        x = (draw(3, 4, width) * draw(3, 4, 1, scale=30.0).detach()).detach()
        x[0] *= eps**0.5 / 30  # rows small enough for epsilon to matter
        x.requires_grad_()
        vars(twin)["weight"] = factor = draw(width).detach()  # shadows the module's own
        return rms_norm(x, factor, eps, offset), type(module).forward(twin, x), [x]

    return _difference(run, weight)


def _mlp_forward(module: nn.Module, recompute: bool) -> Forward | str:
    names = _projections(module)
    assert names is not None
    if "forward" in vars(module):
        return "its forward has been replaced already"
    if list(inspect.signature(type(module).forward).parameters)[2:]:
        return "it takes more than its input"
    reason = ""
    for gated in (gelu_mul, silu_mul):
        reason = _test_mlp(module, names, gated)
        if not reason:
            return _mlp_method(names, gated, recompute)
    return reason


def _multipliers(module: Any) -> tuple[float, float]:
    """Return Falcon-H1's factors of the gate and of the result."""
    return float(getattr(module, "gate_multiplier", 1.0)), float(getattr(module, "down_multiplier", 1.0))


def _mlp_method(names: tuple[str, ...], gated: Gated, recompute: bool) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        if len(names) == 3:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        of_gate, of_result = _multipliers(self)
        if of_gate != 1.0:
            gate = gate * of_gate
        h = gated(gate, up)
        if recompute and _should_recompute(h):
            setattr(h, _RECOMPUTE, partial(gated, gate, up))
        result: Tensor = self.down_proj(h)
        return result if of_result == 1.0 else result * of_result

    return forward


def _test_mlp(module: nn.Module, names: tuple[str, ...], gated: Gated) -> str:
    """Return why this MLP is not `gated(gate, up)` between its projections; empty if it is."""
    twin, (of_gate, of_result) = copy.copy(module), _multipliers(module)
    seen: list[Tensor] = []

    def run(draw: Draw) -> tuple[Tensor, Tensor, list[Tensor]]:
        x, gate, up = draw(3, 4, 16), draw(3, 4, 32, scale=3.0), draw(3, 4, 32)
        given = {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat([gate, up], dim=-1)}
        seen.clear()

        def project(name: str, value: Tensor) -> Tensor:
            seen.append(value)
            return given.get(name, value)

        for name in names:
            vars(twin)[name] = partial(project, name)  # shadows the module's own
        result = type(module).forward(twin, x)
        *inputs, end = seen
        projects_last = result is end or hasattr(module, "down_multiplier")
        if not projects_last or len(seen) != len(names) or any(value is not x for value in inputs):
            raise ValueError("it does more than project, activate and project back")
        return gated(gate * of_gate, up) * of_result, result, [gate, up]

    return _difference(run, next(module.parameters()))


def _rotary(plain: Forward, like: Tensor) -> Forward | str:
    if list(inspect.signature(plain).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return "its arguments are not q, k, cos, sin, unsqueeze_dim"

    def test(width: int) -> str:
        def run(draw: Draw) -> tuple[Tensor, Tensor, list[Tensor]]:
            q, k = draw(2, 5, 4, 32), draw(2, 5, 2, 32)
            angle = torch.cat([draw(2, 5, width // 2, scale=3.0).detach()] * 2, dim=-1)
            arguments = q.transpose(1, 2), k.transpose(1, 2), angle.cos(), angle.sin()
            ours, theirs = rope(*arguments), plain(*arguments)
            return torch.cat(ours, dim=1), torch.cat(theirs, dim=1), [q, k]

        return _difference(run, like)

    reason, takes_part = test(32), not test(16)
    return reason or _rotary_function(plain, takes_part)


def _rotary_function(plain: Forward, takes_part: bool) -> Forward:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        usual = unsqueeze_dim == 1 and q.dtype == cos.dtype and cos.dim() == 3
        if usual and (takes_part or cos.shape[-1] == q.shape[-1]):
            return rope(q, k, cos, sin)
        return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return apply_rotary_pos_emb


Draw = Callable[..., Tensor]


def _difference(run: Callable[[Draw], tuple[Tensor, Tensor, list[Tensor]]], like: Tensor) -> str:
    """Compare results and gradients in fp32 and in the model's dtype; return what differs, or an empty string.

    `run` gets a function that draws normal numbers, and returns our result, the model's, and their inputs. For an
    empty model it runs on the CPU.
    """
    device = torch.device("cpu") if like.is_meta else like.device
    for dtype in dict.fromkeys([torch.float32, like.dtype if like.dtype in _ALLOWED else torch.float32]):
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(_draw, generator, dtype)
        try:
            with torch.enable_grad():
                ours, theirs, inputs = run(draw)
                grad = draw(*theirs.shape).detach()
                pairs = [(ours, theirs)]
                pairs += zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, theirs)), strict=True)
        except _FAILURES as error:
            return str(error).split("\n")[0]
        for got, wanted in ((ours.detach(), theirs.detach()) for ours, theirs in pairs):
            if got.dtype != wanted.dtype or got.shape != wanted.shape:
                return f"it returns {tuple(wanted.shape)} in {wanted.dtype}"
            difference = (got.double() - wanted.double()).square().mean().sqrt()
            error_of = float(difference / wanted.double().square().mean().sqrt())
            if not error_of <= _ALLOWED[dtype]:
                return f"it computes something else (off by {error_of:.1g} in a test)"
    return ""


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(*shape, generator=generator, device=generator.device) * scale
    return numbers.to(dtype).requires_grad_()
