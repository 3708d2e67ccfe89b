"""The optimizer's state as each rank saves it in a checkpoint, and its reassembly from these files.

A rank writes its own flat partitions and the position of each trained tensor in them, so a save needs no communication.
The reader reassembles the tensors by name, for any stage and number of ranks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.parallel.engine.eight_bit_moments import EIGHT_BIT_BLOCK

LAYOUT = "scales/layout"
MASTER, SCALES = "master/", "scales/"


@dataclass(frozen=True)
class Pieces:
    """One rank's state: flat tensors "master/0", "exp_avg/0", "scales/exp_avg/0", ... by partition number.

    A moment with fewer elements than its master weights belongs to a whole tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    shards: list[list[Any]]
    """[name, partition, start in it, start in the tensor, elements] of trained tensors."""
    shapes: dict[str, list[int]]
    """Shapes of the trained tensors that have a shard on this rank."""
    offsets: list[int] | None = None
    """Starts of the partitions in the flat buffers, if no block of 8-bit moments spans two ranks."""
    layout: int = 0
    """Hash of the positions of all factors in those buffers."""

    def metadata(self) -> dict[str, str]:
        """Return everything except the tensors, for the header of a file."""
        rest = {"shards": self.shards, "shapes": self.shapes, "offsets": self.offsets, "layout": self.layout}
        return {"pieces": json.dumps(rest)}

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> "Pieces":
        """Rebuild the pieces from `tensors` and `metadata`."""
        return cls(tensors, **json.loads(metadata["pieces"]))


def whole_state(parts: Iterable[Pieces]) -> dict[str, torch.Tensor]:
    """Return all trained tensors as {"master/NAME", "exp_avg/NAME", ...}: whole, fp32, on the CPU.

    Includes the scales of 8-bit moments over the flat buffers, and the LAYOUT of these, if no block spans two ranks.
    """
    state: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, holder, holder_start, start, length in part.shards:
            size = len(part.tensors[f"{MASTER}{holder}"])
            for quantity in {key.partition("/")[0] for key in part.tensors if not key.startswith(SCALES)}:
                piece = part.tensors[f"{quantity}/{holder}"]
                if len(piece) != size:
                    state[f"{quantity}/{name}"] = piece
                    continue
                piece = piece.narrow(0, holder_start, length)
                whole = _zeros(state, f"{quantity}/{name}", torch.Size(part.shapes[name]), piece)
                whole.view(-1).narrow(0, start, length).copy_(piece)
        if part.offsets is not None and part.layout:
            state[LAYOUT] = torch.tensor(part.layout)
            _add_scales(state, part, part.offsets)
    return state


def _zeros(state: dict[str, torch.Tensor], name: str, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    if name not in state:
        state[name] = torch.zeros(shape, dtype=like.dtype)
    return state[name]


def _add_scales(state: dict[str, torch.Tensor], part: Pieces, offsets: list[int]) -> None:
    for name, own in part.tensors.items():
        if not name.startswith(SCALES):
            continue
        start = offsets[int(name.rpartition("/")[2])] // EIGHT_BIT_BLOCK
        before = state.get(name, own.new_zeros(0))
        whole = own.new_zeros(max(len(before), start + len(own)))
        whole[: len(before)] = before
        whole[start : start + len(own)] = own
        state[name] = whole
