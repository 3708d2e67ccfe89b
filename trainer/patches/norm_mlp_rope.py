"""Replace a model's RMSNorm, SwiGLU, GeGLU and rotary embedding with our operators.

Modules are selected by a test rather than by architecture: a copy of the module runs on random data with random
weights and dummy projections. If its values and gradients differ from our operator's by more than rounding,
the module keeps its own forward, and the reason is printed.

With `recompute`, a result carries the function that recomputes it. Adapted layers that read the result save this
function instead of the result (`ops.elementwise.recompute_instead_of_saving`).
"""

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ops.elementwise import gelu_mul, recompute_instead_of_saving, rms_norm, rope, silu_mul
from trainer.contract.known_versions import replaces
from trainer.parallel.engine.partitioned import get_full_shape
from trainer.patches.replace import replace

PARTS = {"rms_norm": "norms", "swiglu": "activation", "rope": "rotary embedding"}
ROTARY = "apply_rotary_pos_emb"
RECOMPUTE_FROM_BYTES = 2**23
"""Minimum size of a result for which recomputation is worth the hooks' host time: 1,024 x 4,096 16-bit values."""
_RECOMPUTE = "_zerolora_recompute"
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative, root mean square
_PROBE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
Forward = Callable[..., Any]
Gated = Callable[[Tensor, Tensor], Tensor]


@dataclass
class ElementwisePlan:
    """The forwards and modeling functions that our operators can replace, and reasons for the others."""

    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    """Pairs (module, new forward)."""
    functions: list[tuple[Any, Forward]] = field(default_factory=list)
    """Pairs (modeling file, new rotary embedding)."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (class or function, reason)."""

    @property
    def norm_count(self) -> int:
        return sum(_is_norm(type(module).__name__) for module, _ in self.forwards)

    @property
    def mlp_count(self) -> int:
        return len(self.forwards) - self.norm_count

    def format_summary(self) -> list[str]:
        replaced = f"{self.norm_count} norms, {self.mlp_count} gated MLPs, {'' if self.functions else 'no '}rotary"
        counts = Counter(self.rejected)
        return [f"element-wise operators: {replaced} embedding"] + [
            f"  not replaced: {count} x {name}: {reason}" for (name, reason), count in counts.items()
        ]

    def explain_unreplaced_parts(self) -> dict[str, str]:
        """Return a dict from each of PARTS to the reason it is not replaced everywhere, or to "" if it is."""
        parts = {"rms_norm": self.norm_count, "swiglu": self.mlp_count, "rope": len(self.functions)}
        reasons = {part: "" if count else "the model has none of a known type" for part, count in parts.items()}
        for name, reason in self.rejected:
            reasons["rms_norm" if _is_norm(name) else "rope" if name == ROTARY else "swiglu"] = f"{name}: {reason}"
        return reasons


def plan_elementwise(model: nn.Module, *, frozen_norms: bool = True, recompute: str = "none") -> ElementwisePlan:
    """Return which norms, MLPs and rotary functions our operators can replace, and why they cannot replace others.

    The model is not changed; it may be on the meta device.
    """
    examined = ElementwisePlan()
    forwards: dict[Any, Forward | str] = {}
    for module in model.modules():
        name = type(module).__name__
        is_norm = _is_norm(name)
        if not is_norm and _find_projections(module) is None:
            continue
        key = _build_key(module)
        if key not in forwards:
            if is_norm:
                forwards[key] = _choose_norm_forward(module, recompute == "norms")
            else:
                forwards[key] = _choose_mlp_forward(module, recompute != "none")
        forward = "the weight is trained" if is_norm and not frozen_norms else forwards[key]
        if isinstance(forward, str):
            examined.rejected.append((name, forward))
        else:
            examined.forwards.append((module, forward))
    like = next(model.parameters())
    for modeling_file in {sys.modules[type(module).__module__] for module in model.modules()}:
        if callable(getattr(modeling_file, ROTARY, None)):
            function = _build_rotary(getattr(modeling_file, ROTARY), like)
            if isinstance(function, str):
                examined.rejected.append((ROTARY, function))
            else:
                examined.functions.append((modeling_file, function))
    return examined


@replaces("the forward of RMSNorm and gated MLPs, and `apply_rotary_pos_emb`")
def replace_elementwise(model: nn.Module, *, frozen_norms: bool = True, recompute: str = "none") -> ElementwisePlan:
    """Replace norms, gated MLPs and rotary embedding with our operators where both give the same results.

    Call it before adding adapters. Without `frozen_norms`, norms keep the model's code. `recompute` selects
    the outputs that layers recompute: of gated MLPs (`activations`), of gated MLPs and norms (`norms`), or `none`.
    """
    examined = plan_elementwise(model, frozen_norms=frozen_norms, recompute=recompute)
    for module, forward in examined.forwards:
        # A bound method follows its module when PEFT copies it; a closure would keep the old weights.
        replace(module, "forward", MethodType(forward, module))
    for modeling_file, function in examined.functions:
        replace(modeling_file, ROTARY, function)
    return examined


@replaces("the forward of adapted layers, to recompute their inputs")
def install_input_recomputation(model: nn.Module, exclude: Sequence[nn.Module] = ()) -> int:
    """Make adapted layers outside `exclude` recompute their inputs instead of saving them. Return their number."""
    from peft.tuners.lora import LoraLayer

    excluded = {module for part in exclude for module in part.modules()}
    layers: list[Any] = [part for part in model.modules() if isinstance(part, LoraLayer) and part not in excluded]
    for layer in layers:
        replace(layer, "forward", partial(_forward_recomputing, layer.forward))
    return len(layers)


def _forward_recomputing(forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    recompute = getattr(x, _RECOMPUTE, None)
    with recompute_instead_of_saving(x, recompute) if recompute else nullcontext():
        return forward(x, *args, **kwargs)


def _should_recompute(result: Tensor) -> bool:
    return result.requires_grad and result.numel() * result.element_size() >= RECOMPUTE_FROM_BYTES


def _is_norm(name: str) -> bool:
    return name.endswith("RMSNorm")


def _find_projections(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of a gated MLP's projections, the output projection last; None for other modules."""
    for names in (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")):
        if all(isinstance(module._modules.get(name), nn.Module) for name in names):
            return names
    return None


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module is a gated MLP whose forward takes only the hidden states."""
    if _find_projections(module) is None:
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2


def _build_key(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is the same for modules that differ only in the values of their weights."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    children = tuple(type(child) for child in module.children())
    weights = tuple((weight.dtype, weight.shape, weight.device) for weight in module.parameters(recurse=False))
    return type(module), tuple(settings.items()), children, weights, "forward" in vars(module)


def _choose_norm_forward(module: nn.Module, recompute: bool) -> Forward | str:
    original, weight = type(module).forward, getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "forward" in vars(module):
        return "the forward was already replaced"
    takes_more = len(inspect.signature(original).parameters) > 2
    if takes_more or [name for name, _ in module.named_parameters()] != ["weight"]:
        return "has more than one argument or weight"
    if eps is None or weight is None:
        return "the epsilon has an unknown name"
    for offset in (0.0, 1.0):
        if not (reason := _test_norm(module, weight, float(eps), offset)):
            return _build_norm_forward(original, float(eps), offset, recompute)
    return reason


def _build_norm_forward(original: Forward, eps: float, offset: float, recompute: bool) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype or weight.requires_grad:
            return original(self, x)
        y = rms_norm(x, weight, eps, offset)
        if recompute and _should_recompute(y):
            setattr(y, _RECOMPUTE, partial(rms_norm, x, weight, eps, offset))
        return y

    return forward


def _test_norm(module: nn.Module, weight: Tensor, eps: float, offset: float) -> str:
    width = (get_full_shape(weight) or [0])[0] or 64  # a partitioned weight may lack its shape
    probe = copy.copy(module)

    def run(draw: Draw) -> tuple[Tensor, Tensor, list[Tensor]]:
        x = (draw(3, 4, width) * draw(3, 4, 1, scale=30.0).detach()).detach()
        x[0] *= eps**0.5 / 30  # rows small enough for epsilon to matter
        x.requires_grad_()
        vars(probe)["weight"] = factor = draw(width).detach()  # shadows the module's weight
        return rms_norm(x, factor, eps, offset), type(module).forward(probe, x), [x]

    return _describe_difference(run, weight)


def _choose_mlp_forward(module: nn.Module, recompute: bool) -> Forward | str:
    names = _find_projections(module)
    assert names is not None
    if "forward" in vars(module):
        return "the forward was already replaced"
    if len(inspect.signature(type(module).forward).parameters) > 2:
        return "has more than one argument"
    for gated in (gelu_mul, silu_mul):
        if not (reason := _test_mlp(module, names, gated)):
            return _build_mlp_forward(names, gated, recompute)
    return reason


def _read_multipliers(module: Any) -> tuple[float, float]:
    """Return Falcon-H1's multipliers for the gate and the result; 1 for other models."""
    return float(getattr(module, "gate_multiplier", 1.0)), float(getattr(module, "down_multiplier", 1.0))


def _build_mlp_forward(names: tuple[str, ...], gated: Gated, recompute: bool) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        if len(names) == 3:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate_factor, result_factor = _read_multipliers(self)
        if gate_factor != 1.0:
            gate = gate * gate_factor
        h = gated(gate, up)
        if recompute and _should_recompute(h):
            setattr(h, _RECOMPUTE, partial(gated, gate, up))
        result: Tensor = self.down_proj(h)
        return result if result_factor == 1.0 else result * result_factor

    return forward


def _test_mlp(module: nn.Module, names: tuple[str, ...], gated: Gated) -> str:
    """Return how this MLP differs from `gated(gate, up)` between its projections; "" if it does not."""
    probe, (gate_factor, result_factor) = copy.copy(module), _read_multipliers(module)
    received: list[Tensor] = []

    def run(draw: Draw) -> tuple[Tensor, Tensor, list[Tensor]]:
        x, gate, up = draw(3, 4, 16), draw(3, 4, 32, scale=3.0), draw(3, 4, 32)
        projected = {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat([gate, up], dim=-1)}
        received.clear()

        def project(name: str, value: Tensor) -> Tensor:
            received.append(value)
            return projected.get(name, value)

        for name in names:
            vars(probe)[name] = partial(project, name)  # shadows the module's projection
        result = type(module).forward(probe, x)
        *inputs, last = received
        projects_last = result is last or hasattr(module, "down_multiplier")
        if not projects_last or len(received) != len(names) or any(value is not x for value in inputs):
            raise ValueError("does more than project, activate and project back")
        return gated(gate * gate_factor, up) * result_factor, result, [gate, up]

    return _describe_difference(run, next(module.parameters()))


def _build_rotary(original: Forward, like: Tensor) -> Forward | str:
    if list(inspect.signature(original).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return "the arguments are not q, k, cos, sin, unsqueeze_dim"

    def test(width: int) -> str:
        def run(draw: Draw) -> tuple[Tensor, Tensor, list[Tensor]]:
            q, k = draw(2, 5, 4, 32), draw(2, 5, 2, 32)
            angle = torch.cat([draw(2, 5, width // 2, scale=3.0).detach()] * 2, dim=-1)
            arguments = q.transpose(1, 2), k.transpose(1, 2), angle.cos(), angle.sin()
            ours, theirs = rope(*arguments), original(*arguments)
            return torch.cat(ours, dim=1), torch.cat(theirs, dim=1), [q, k]

        return _describe_difference(run, like)

    reason, rotates_part = test(32), not test(16)

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        is_supported = unsqueeze_dim == 1 and q.dtype == cos.dtype and cos.dim() == 3
        if is_supported and (rotates_part or cos.shape[-1] == q.shape[-1]):
            return rope(q, k, cos, sin)
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return reason or apply_rotary_pos_emb


Draw = Callable[..., Tensor]


def _describe_difference(run: Callable[[Draw], tuple[Tensor, Tensor, list[Tensor]]], like: Tensor) -> str:
    """Compare results and gradients in fp32 and in the model's dtype, and describe the difference; "" if there is none.

    `run` receives a function that draws normally distributed numbers, and returns our result, the model's result, and
    their inputs. Models on the meta device are tested on the CPU.
    """
    device = torch.device("cpu") if like.is_meta else like.device
    for dtype in dict.fromkeys([torch.float32, like.dtype if like.dtype in _TOLERANCES else torch.float32]):
        draw = partial(_draw, torch.Generator(device).manual_seed(0), dtype)
        try:
            with torch.enable_grad():
                ours, theirs, inputs = run(draw)
                grad = draw(*theirs.shape).detach()
                pairs = [(ours, theirs)]
                pairs += zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, theirs)), strict=True)
        except _PROBE_ERRORS as error:
            return str(error).split("\n")[0]
        for actual, expected in ((ours.detach(), theirs.detach()) for ours, theirs in pairs):
            if actual.dtype != expected.dtype or actual.shape != expected.shape:
                return f"returns {tuple(expected.shape)} in {expected.dtype}"
            difference = (actual.double() - expected.double()).square().mean().sqrt()
            relative_error = float(difference / expected.double().square().mean().sqrt())
            if not relative_error <= _TOLERANCES[dtype]:
                return f"differs from our operator (relative error {relative_error:.1g} in a test)"
    return ""


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(*shape, generator=generator, device=generator.device) * scale
    return numbers.to(dtype).requires_grad_()
