"""Store all LoRA factors in one Parameter, so that the engine and the optimizer handle one tensor instead of hundreds.

PEFT's Parameters keep their names and become views of this buffer, so saving, merging and loading are unaffected. In a
forward pass with gradients each adapter module reads its weight through autograd's views of the buffer, so autograd
computes one concatenated gradient.

Layout: layers with the same pair of shapes are adjacent, all A [N, R, I], then all B [N, O, R] (N layers, R rank,
I inputs, O outputs), so a batched matmul over the layers needs no copy. Each factor starts at a multiple of 16 bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import OPTIMIZERS, resolve_engine_zero
from trainer.contract.known_versions import patch_objects, replaces
from trainer.parallel.engine.adapter_choice import AdapterChoice, find_choice

ALIGNMENT_BYTES = 16
FLAT_PREFIX = "flat_adapter_"  # prefix of the buffers' names
DOWN, UP = "down", "up"
ViewHook = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Member:
    """A LoRA factor: its name in the model, the module that reads it, and PEFT's Parameter."""

    name: str
    module: nn.Module
    parameter: nn.Parameter


@dataclass(frozen=True)
class Block:
    """Adjacent factors with the same shape; row n belongs to member n."""

    members: tuple[Member, ...]
    buffer: int
    start: int
    stride: int

    @property
    def shape(self) -> torch.Size:
        return self.members[0].parameter.shape

    @property
    def elements(self) -> int:
        return len(self.members) * self.stride

    def view_stacked(self, piece: Tensor) -> Tensor:
        """View the block's piece of the buffer as [N, *shape], without padding."""
        rows = piece.view(len(self.members), self.stride)
        numel = self.shape.numel()
        if numel != self.stride:
            rows = rows[:, :numel]
        return rows.view(len(self.members), *self.shape)


class FlatAdapter:
    """The flat buffers, their blocks, and the views that the current forward pass reads."""

    def __init__(
        self, pairs: Sequence[tuple[Member, Member]], *, separate_up: bool, choice: AdapterChoice | None = None
    ) -> None:
        """Copy the factors into one buffer, two for A and B (`separate_up`, LoRA+), or one per adapter (`choice`)."""
        self.blocks: list[Block] = []
        self.choice = choice
        names = list(choice.names) if choice else []
        ends = [0] * (len(names) or 1 + separate_up)
        groups: dict[tuple[int, torch.Size, torch.Size], list[tuple[Member, Member]]] = {}
        for down, up in pairs:
            adapter = names.index(down.name.split(".")[-2]) if names else 0
            groups.setdefault((adapter, down.parameter.shape, up.parameter.shape), []).append((down, up))
        sample = pairs[0][0].parameter
        alignment = max(1, ALIGNMENT_BYTES // sample.element_size())
        for (adapter, *_), group in groups.items():
            for side, members in enumerate(zip(*group, strict=True)):
                buffer = side if separate_up else adapter
                numel = members[0].parameter.numel()
                stride = (numel + alignment - 1) // alignment * alignment
                self.blocks.append(Block(members, buffer, ends[buffer], stride))
                ends[buffer] += self.blocks[-1].elements
        self.buffers = [nn.Parameter(torch.zeros(end, dtype=sample.dtype, device=sample.device)) for end in ends]
        self.stacks: dict[int, Tensor] = {}
        """Stacked factors [N, *shape] by block index, in the graph of the latest forward pass with gradients."""
        self.view_hook: ViewHook | None = None
        """Function called with the name and the view of each factor when its view is created."""
        self._sources: Sequence[Tensor] | None = None
        self._builds_views = True
        with torch.no_grad():
            for member, view in self._list_rows():
                view.copy_(member.parameter)
        self.repoint_parameters()

    @property
    def members(self) -> list[Member]:
        return [member for block in self.blocks for member in block.members]

    def list_spans(self) -> dict[str, tuple[int, int, int]]:
        """Return (buffer, start, elements) by factor name; if an adapter is selected, only that adapter's factors."""
        return {
            name: (block.buffer, block.start + row * block.stride, block.shape.numel())
            for block in self.blocks
            for row, member in enumerate(block.members)
            if (name := self.choice.get_saved_name(member.name) if self.choice else member.name) is not None
        }

    def read_block(self, index: int) -> Tensor:
        """Return a block's values as [N, *shape], detached from the autograd graph."""
        block = self.blocks[index]
        return block.view_stacked(self.buffers[block.buffer].data.narrow(0, block.start, block.elements))

    def find_rows(self, parameters: Sequence[nn.Parameter]) -> tuple[int, slice] | None:
        """Return the block index and the rows of these PEFT Parameters; None unless they are adjacent in one block."""
        for number, block in enumerate(self.blocks):
            ids = [id(member.parameter) for member in block.members]
            if id(parameters[0]) in ids:
                start = ids.index(id(parameters[0]))
                rows = slice(start, start + len(parameters))
                return (number, rows) if ids[rows] == [id(parameter) for parameter in parameters] else None
        return None

    def repoint_parameters(self) -> None:
        """Point PEFT's Parameters at the buffers again after the engine has moved them in memory."""
        for member, view in self._list_rows():
            member.parameter.data = view
            member.parameter.requires_grad_(False)

    def create_weight_views(self, *_: Any) -> None:
        """Create the views in the autograd graph before a pass with gradients (a forward pre-hook)."""
        self.stacks = {}
        for member in self.members:  # autograd rejects views that are older than an update of the buffer
            member.module.__dict__.pop("weight", None)
        if not torch.is_grad_enabled():
            return
        common = self.choice if self.choice and self.choice.selected is None and self.choice.row_groups else None
        for index, buffer in enumerate(self._sources or self.buffers):
            blocks = [(number, block) for number, block in enumerate(self.blocks) if block.buffer == index]
            pieces = buffer.split([block.elements for _, block in blocks])
            for (number, block), piece in zip(blocks, pieces, strict=True):
                stack = block.view_stacked(piece)
                self.stacks[number] = stack
                if not self._builds_views or common:
                    continue
                for member, view in zip(block.members, stack.unbind(0), strict=True):
                    # Shadows the registered Parameter, which stays unchanged.
                    member.module.__dict__["weight"] = view
                    if self.view_hook is not None:
                        self.view_hook(member.name, view)
        if common:
            self._stack_adapters(common)

    def _stack_adapters(self, choice: AdapterChoice) -> None:
        """Stack the buffers of each row group's P adapters, and store factors as views [P, *shape] of the stack."""
        choice.factors = {}
        for names, _ in choice.row_groups:
            first, *others = (choice.names.index(name) for name in names)
            buffers: list[Tensor] = [self.buffers[index] for index in (first, *others)]
            stacked = torch.stack(buffers) if others else buffers[0][None]
            blocks = [block for block in self.blocks if block.buffer == first]
            for block, piece in zip(blocks, stacked.split([block.elements for block in blocks], dim=1), strict=True):
                rows = piece.unflatten(1, (len(block.members), block.stride))[..., : block.shape.numel()]
                for member, factor in zip(block.members, rows.unflatten(-1, block.shape).unbind(1), strict=True):
                    choice.factors[member.name] = factor
                    if self.view_hook is not None:
                        for name in names:
                            self.view_hook(member.name.replace(f".{names[0]}.weight", f".{name}.weight"), factor)

    @contextmanager
    def keep_views(self) -> Iterator[None]:
        """Restore the current views after a block that runs other passes.

        A pending backward pass may read them. If no views exist (after a graph replay), the last views created in
        the block are kept, because the block's own backward pass may need them.
        """
        stacks, factors = self.stacks, self.choice.factors if self.choice else {}
        views = [member.module.__dict__.get("weight") for member in self.members]
        try:
            yield
        finally:
            self.stacks = stacks
            if self.choice:
                self.choice.factors = factors
            for member, view in zip(self.members, views, strict=True):
                if view is not None:
                    member.module.__dict__["weight"] = view

    @contextmanager
    def read_from(self, sources: Sequence[Tensor]) -> Iterator[None]:
        """Make forward passes in the block read `sources` instead of the buffers; drop the views afterwards."""
        self._sources = sources
        try:
            yield
        finally:
            self._sources, self.stacks = None, {}
            for member in self.members:
                member.module.__dict__.pop("weight", None)

    def build_stacks_only(self) -> AbstractContextManager[None]:
        """Within the block, create stacks of factors without views for modules, which must not read their weights."""
        return patch_objects((self, "_builds_views", False))

    def _list_rows(self) -> list[tuple[Member, Tensor]]:
        return [
            (member, view)
            for number, block in enumerate(self.blocks)
            for member, view in zip(block.members, self.read_block(number).unbind(0), strict=True)
        ]


@replaces("the factors that PEFT reads in a forward pass")
def flatten_adapter(model: Any, *, separate_up: bool) -> FlatAdapter | None:
    """Move a model's trained LoRA factors into registered flat buffers, separate for A and B with `separate_up`."""
    from peft.tuners.lora import LoraLayer

    pairs: list[tuple[Member, Member]] = []
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A and layer.lora_A[adapter].weight.requires_grad:
                down, up = layer.lora_A[adapter], layer.lora_B[adapter]
                pairs.append(
                    (
                        Member(f"{path}.lora_A.{adapter}.weight", down, down.weight),
                        Member(f"{path}.lora_B.{adapter}.weight", up, up.weight),
                    )
                )
    if not pairs:
        return None
    choice = find_choice(model)
    flat = FlatAdapter(pairs, separate_up=separate_up, choice=choice)
    sides: Sequence[str] = (DOWN, UP) if separate_up else ("both",)
    if choice is not None:
        sides = [str(number) for number in range(len(choice.names))]
    for side, buffer in zip(sides, flat.buffers, strict=True):
        model.register_parameter(f"{FLAT_PREFIX}{side}", buffer)
    model.flat_adapter = flat
    model.register_forward_pre_hook(flat.create_weight_views)
    return flat


def find_flat_adapter(model: Any) -> FlatAdapter | None:
    return getattr(model, "flat_adapter", None)


def list_trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters by PEFT's names, with the factors of a flat buffer instead of the buffer itself.

    With several adapters, returns only the selected adapter's parameters, named as in a single-adapter run.
    """
    flat = find_flat_adapter(model)
    factors = {id(member.parameter) for member in flat.members} if flat else set()
    buffers = {id(buffer) for buffer in flat.buffers} if flat else set()
    trained = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) in factors or (parameter.requires_grad and id(parameter) not in buffers)
    ]
    choice = find_choice(model)
    if choice is None:
        return trained
    return [(new, parameter) for name, parameter in trained if (new := choice.get_saved_name(name)) is not None]


def describe_flat_problem(config: Any) -> str | None:
    if config.adapter == "none":
        return "no adapter"
    if not config.ops.flat:
        return "ops.flat: false"
    if OPTIMIZERS[config.training.optimizer].needs_matrices:
        return f"training.optimizer={config.training.optimizer} needs separate matrices"
    if resolve_engine_zero(config).stage == 3:
        return "DeepSpeed's stage 3 partitions every parameter separately"
    if config.training.torch_compile:
        return "torch.compile traces each layer's own weights"
    return None
