"""Replace PEFT's forward with fused operators, and report the layers that keep PEFT's.

A layer is fused if its base layer is a plain, 4-bit or 8-bit linear layer with one ordinary LoRA adapter. Adapters may
be disabled, merged or switched later, so every call checks whether the adapter is active, and otherwise uses PEFT's
forward. The first of several shared-input projections (q/k/v, gate/up) computes all of them in one call.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ops
from ops.groups import find_groups
from ops.lora import MAX_RANK
from trainer.contract.known_versions import replaces, require
from trainer.model.eight_bit import FrozenLinear8bit
from trainer.model.expert_adapter import ParamWrapper
from trainer.model.four_bit import FrozenLinear4bit, dequantize_weight
from trainer.model.packed_experts import FrozenLinearGrouped
from trainer.parallel.engine.layer_gather.shards import LayerShards, get_layer_shards, get_unit
from trainer.parallel.engine.linear_layers import is_linear
from trainer.parallel.engine.partitioned import is_partitioned
from trainer.patches.replace import replace

TEST_TOKENS = 128
MANY_TOKENS = 4096
"""The operators use other kernels for this many tokens or more (kFewTokens in ops/csrc/operator/passes.h)."""


@dataclass
class FusionReport:
    total: int
    backend: str
    groups: list[tuple[str, ...]] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (name, reason) for layers that are not fused."""

    @property
    def fused_count(self) -> int:
        return self.total - len(self.rejected)

    def format_summary(self) -> list[str]:
        grouped = sum(len(group) for group in self.groups if len(group) > 1)
        lines = [f"fused {self.fused_count} of {self.total} adapted layers ({self.backend}), {grouped} of them grouped"]
        examples = {reason: name for name, reason in reversed(self.rejected)}
        counts = Counter(reason for _, reason in self.rejected)
        return lines + [
            f"  not fused: {count} layers ({examples[reason]}): {reason}" for reason, count in counts.items()
        ]


@replaces("the forward of PEFT's LoRA layers")
def fuse_layers(
    model: nn.Module,
    backend: Literal["auto", "cuda", "reference"],
    *,
    forward: Callable[[], object] | None,
    separate: bool = False,
    tokens: int = 0,
) -> FusionReport:
    """Replace the forward of every adapted layer that the operators support.

    `forward` runs the model once on a few tokens, to find the layers that share an input. With `separate`, these
    are still computed one by one. `tokens` is the size of a micro-batch; it decides which kernels are tested.
    Raises ValueError if `cuda` is requested but not available, or if the operators fail their self-test.
    """
    chosen = ops.load_backend(backend)
    report, groups = group_layers(model, forward, separate=separate, backend=f"{chosen.name}: {chosen.reason}")
    check_operators(groups, get_layer_shards(model), test_many_tokens=chosen.name == "cuda" and tokens >= MANY_TOKENS)
    for group in groups:
        group.install()
    return report


def group_layers(
    model: nn.Module, forward: Callable[[], object] | None, *, separate: bool, backend: str = ""
) -> tuple[FusionReport, list["FusedGroup"]]:
    """Return the report of `fuse_layers` and the groups of layers it would fuse, without changing the model."""
    from peft.tuners.lora import LoraLayer

    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)  # experts: fused_experts.py
    }
    report = FusionReport(len(layers), backend)
    members: dict[str, FusedLayer] = {}
    for name, layer in layers.items():
        if reason := describe_fusion_problem(layer):
            report.rejected.append((name, reason))
        else:
            members[name] = FusedLayer(layer)
    if forward is None or separate:
        report.groups = [(name,) for name in members]
    else:
        for names in find_groups({name: layers[name] for name in members}, forward):
            together = len({(members[name].kind, members[name].unit) for name in names}) == 1
            report.groups += [names] if together else [(name,) for name in names]
    return report, [FusedGroup([members[name] for name in names]) for names in report.groups]


def describe_fusion_problem(layer: Any) -> str | None:
    from peft.tuners import lora

    base = layer.base_layer
    names = layer.active_adapters
    if type(base) not in (FrozenLinear4bit, FrozenLinear8bit, FrozenLinearGrouped) and not is_linear(base):
        return f"the base is {type(base).__name__}, not a linear layer"
    if isinstance(base, FrozenLinear4bit) and base.quant_state.quant_type != "nf4":
        return f"the base is quantized as {base.quant_state.quant_type}, not nf4"
    if len(names) != 1 or names[0] not in layer.lora_A:
        return f"{len(names)} active adapters instead of one"
    if require(layer, "lora_variant", "peft").get(names[0]) is not None:
        return "the operators do not support DoRA"
    if require(layer, "lora_bias", "peft").get(names[0]):
        return "the adapter has a bias"
    if layer.r[names[0]] > MAX_RANK:
        return f"r={layer.r[names[0]]} is above {MAX_RANK}"
    if isinstance(layer, lora.Linear) and require(layer, "fan_in_fan_out", "peft"):
        return "the weight is stored transposed"
    if type(layer.lora_dropout[names[0]]) not in (nn.Dropout, nn.Identity):
        return f"dropout is {type(layer.lora_dropout[names[0]]).__name__}"
    return None


class FusedLayer:
    """Reads the operator's arguments from an adapted layer at every call.

    To make these reads cheap, modules are looked up once, and PEFT's attributes are read directly.
    """

    def __init__(self, layer: Any, active: Sequence[str] | None = None) -> None:
        """Read the layer's first active adapter. `active` is PEFT's list of active adapters if it has several."""
        for name in ("_disable_adapters", "_active_adapter"):
            require(layer, name, "peft")
        self.layer = layer
        self.peft_forward = layer.forward
        self.adapter: str = layer.active_adapters[0]
        self.base: Any = layer.base_layer
        self.unit = get_unit(self.base.weight)  # units are gathered at different times
        self.packed = isinstance(self.base, FrozenLinear4bit)
        self.is_8bit = isinstance(self.base, FrozenLinear8bit)
        self.grouped = isinstance(self.base, FrozenLinearGrouped)
        # PEFT stores a name or a list.
        self._active: tuple[Any, ...] = (active,) if active else (self.adapter, [self.adapter])
        self._down_module, self._up_module = layer.lora_A[self.adapter], layer.lora_B[self.adapter]
        self._dropout_module = layer.lora_dropout[self.adapter]
        self._nf4: ops.Nf4Weight | None = None

    @property
    def has_dropout(self) -> bool:
        return isinstance(self._dropout_module, nn.Dropout) and self._dropout_module.p > 0.0

    def applies_to(self, x: Tensor) -> bool:
        layer = self.layer
        is_active = not layer._disable_adapters and not layer.merged_adapters and layer._active_adapter in self._active
        return is_active and x.dim() > 1 and x.dtype == self.down.dtype == self.compute_dtype

    @property
    def kind(self) -> tuple[Any, ...]:
        """Properties that layers computed in one call must have in common."""
        packing: Any = self.nf4.layout() if self.packed else self.base.weight.dtype
        if self.is_8bit:
            packing = packing, self.base.block, self.base.exact
        return type(self.base), packing, self.compute_dtype, self.down.dtype, getattr(self._dropout_module, "p", 0.0)

    @property
    def nf4(self) -> ops.Nf4Weight:
        """Packed weight, rebuilt only if the Parameter or its state was replaced or moved."""
        weight: Any = self.base.weight
        nf4, absmax = self._nf4, weight.quant_state.absmax
        if nf4 is None or nf4.packed is not weight or nf4.state[0] is not absmax:
            self._nf4 = nf4 = ops.Nf4Weight.from_parameter(weight)
        return nf4

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.base.compute_dtype if self.packed or self.is_8bit or self.grouped else self.base.weight.dtype

    @property
    def down(self) -> Tensor:
        return self._down_module.weight

    @property
    def up(self) -> Tensor:
        return self._up_module.weight

    @property
    def dropout(self) -> float:
        module = self._dropout_module
        return float(module.p) if module.training and isinstance(module, nn.Dropout) else 0.0


class FusedGroup:
    """Computes one or more layers that share an input in one call."""

    def __init__(self, members: Sequence[FusedLayer]) -> None:
        self.members = list(members)
        # Outputs that the first member computed for the others, which fetch them in the same forward pass.
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def install(self) -> None:
        for index, member in enumerate(self.members):
            replace(member.layer, "forward", self._build_forward(index, member))

    def _build_forward(self, index: int, member: FusedLayer) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or not member.applies_to(x):
                return member.peft_forward(x, *args, **kwargs)
            return self.compute_output(index, x)

        return forward

    def compute_output(self, index: int, x: Tensor) -> Tensor:
        if index == 0:
            self._input, self._waiting = None, {}
            if len(self.members) > 1 and all(member.applies_to(x) for member in self.members[1:]):
                first, *others = self.compute(self.members, x)
                self._input, self._waiting = x, dict(enumerate(others, start=1))
                return first
        elif self._input is x and index in self._waiting:
            output = self._waiting.pop(index)
            if not self._waiting:
                self._input = None
            return output
        return self.compute([self.members[index]], x)[0]

    def compute(self, members: Sequence[FusedLayer], x: Tensor) -> list[Tensor]:
        return compute_group(members, x)


def compute_group(
    members: Sequence[FusedLayer], x: Tensor, factors: tuple[list[Tensor], list[Tensor]] | None = None
) -> list[Tensor]:
    """Compute y_i = x W_i^T + bias_i + s_i dropout(x) A_i^T B_i^T for all members, with a shared dropout mask.

    If given, `factors` replace the members' A_i and B_i, and there is no dropout.
    """
    downs, ups = factors or ([member.down for member in members], [member.up for member in members])
    scales = [member.layer.scaling[member.adapter] for member in members]
    dropout = members[0].dropout if factors is None else 0.0
    arguments = ([member.base.bias for member in members], downs, ups, scales, dropout)
    if members[0].packed:
        return ops.nf4_group(x, [member.nf4 for member in members], *arguments)
    if members[0].is_8bit and members[0].base.exact:
        return ops.scaled_group(x, [member.base.scaled for member in members], *arguments)
    if members[0].grouped:
        return ops.grouped_group(x, [(member.base.weight, member.base.layout) for member in members], *arguments)
    if members[0].is_8bit:
        return ops.eight_bit_group(x, [member.base.packed for member in members], *arguments)
    return ops.lora_group(x, [member.base.weight for member in members], *arguments)


def check_operators(
    groups: Sequence[FusedGroup], shards: LayerShards | None = None, *, test_many_tokens: bool = False
) -> None:
    """Compare the operators with plain torch on this model's own weights, once per shape.

    Runs a few random tokens forward and backward. With `test_many_tokens`, repeats the test with MANY_TOKENS. Raises
    ValueError if an error exceeds a few roundings of the compute dtype.
    """
    tested: set[tuple[Any, ...]] = set()
    for group in groups:
        members = group.members
        shapes = tuple((tuple(member.down.shape), tuple(member.up.shape)) for member in members)
        if (shapes, members[0].kind) not in tested:
            tested.add((shapes, members[0].kind))
            with _gather(members, shards):
                _check_group(members, (1, MANY_TOKENS // TEST_TOKENS) if test_many_tokens else (1,))


def _gather(members: Sequence[FusedLayer], shards: LayerShards | None) -> AbstractContextManager[Any]:
    import deepspeed

    if shards is not None:
        return shards.gather([member.layer for member in members])
    weights = [weight for member in members for weight in member.layer.parameters() if is_partitioned(weight)]
    return deepspeed.zero.GatheredParameters(weights) if weights else nullcontext()


def _check_group(members: Sequence[FusedLayer], repeats: Sequence[int]) -> None:
    first = members[0]
    device, dtype = first.down.device, first.compute_dtype
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator).requires_grad_()

    x = draw(TEST_TOKENS, first.down.shape[1])
    downs = [draw(*member.down.shape) for member in members]
    ups = [draw(*member.up.shape) for member in members]
    # Scaled so that the sums over all tokens stay in the range of fp16.
    grads = [draw(TEST_TOKENS, up.shape[0]).detach() / up.shape[0] ** 0.5 for up in ups]
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, *downs, *ups)]
    expected = _run_plain(members, exact[0], exact[1 : 1 + len(members)], exact[1 + len(members) :])
    expected_grads = torch.autograd.grad(expected, exact, [grad.float() for grad in grads])
    allowed = 1e-3 if dtype == torch.float32 else 2e-2
    for repeat in repeats:
        tokens = x.detach().repeat(repeat, 1).requires_grad_()
        outputs = compute_group(members, tokens, (downs, ups))
        our_grads = torch.autograd.grad(outputs, [tokens, *downs, *ups], [grad.repeat(repeat, 1) for grad in grads])
        pairs = [("output", *pair) for pair in zip(outputs, expected, strict=True)]
        pairs += [("gradient", *pair) for pair in zip(our_grads, expected_grads, strict=True)]
        for quantity, actual, reference in pairs:
            error = _compute_relative_error(actual.detach(), reference.detach(), repeat)
            if not error <= allowed:
                raise ValueError(
                    f"ops.backend={ops.load_backend().name}: self-test of layers {[tuple(up.shape) for up in ups]} "
                    f"in {dtype}, {len(tokens)} tokens: {quantity} is off by {error:.2g} (allowed {allowed}); use "
                    "ops.backend: peft, and report this GPU"
                )


def _compute_relative_error(actual: Tensor, expected: Tensor, repeat: int) -> float:
    """Return the RMS error of a batch repeated `repeat` times, relative to the RMS of one repetition (`expected`)."""
    if actual.shape == expected.shape:  # the gradient of a factor, which sums over the repetitions
        expected = repeat * expected
    parts = actual.split(len(expected))
    mean = sum(float((part.float() - expected).square().mean()) for part in parts) / len(parts)
    return float((mean / expected.square().mean()) ** 0.5)


def _run_plain(members: Sequence[FusedLayer], x: Tensor, downs: list[Tensor], ups: list[Tensor]) -> list[Tensor]:
    outputs = []
    for member, down, up in zip(members, downs, ups, strict=True):
        base = member.base
        weight = base.weight
        if isinstance(base, FrozenLinear4bit):
            weight = dequantize_weight(weight, base.quant_state, torch.float32)
        elif isinstance(base, FrozenLinear8bit | FrozenLinearGrouped):
            weight = base.dequantize(torch.float32)
        bias = None if base.bias is None else base.bias.float()
        frozen = nn.functional.linear(x, weight.detach().float(), bias)
        outputs.append(frozen + member.layer.scaling[member.adapter] * (x @ down.t()) @ up.t())
    return outputs
