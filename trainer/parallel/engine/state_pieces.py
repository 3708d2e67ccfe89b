"""The optimizer's state as each rank saves it in a checkpoint, and its reassembly from these files.

A rank writes its own flat partitions and the position of each trained tensor in them, so a save needs no communication.
The reader reassembles the tensors by name, for any stage and number of ranks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pieces:
    """One rank's state: flat tensors "master/0", "exp_avg/0", ... by partition number.

    A moment with fewer elements than its master weights belongs to a whole tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    shards: list[list[Any]]
    """`EngineState.positions`."""
    shapes: dict[str, list[int]]
    """Shapes of the trained tensors that have a shard on this rank."""

    def metadata(self) -> dict[str, str]:
        """Return everything except the tensors, for the header of a file."""
        return {"pieces": json.dumps({"shards": self.shards, "shapes": self.shapes})}

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> "Pieces":
        """Rebuild the pieces from `tensors` and `metadata`."""
        return cls(tensors, **json.loads(metadata["pieces"]))


def whole_state(parts: Iterable[Pieces]) -> dict[str, torch.Tensor]:
    """Return all trained tensors as {"master/NAME", "exp_avg/NAME", ...}: whole, fp32, on the CPU."""
    state: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, holder, holder_start, start, length in part.shards:
            size = len(part.tensors[f"master/{holder}"])
            for quantity in {key.partition("/")[0] for key in part.tensors}:
                piece = part.tensors[f"{quantity}/{holder}"]
                if len(piece) != size:
                    state[f"{quantity}/{name}"] = piece
                    continue
                piece = piece.narrow(0, holder_start, length)
                if f"{quantity}/{name}" not in state:
                    state[f"{quantity}/{name}"] = torch.zeros(part.shapes[name], dtype=piece.dtype)
                state[f"{quantity}/{name}"].view(-1).narrow(0, start, length).copy_(piece)
    return state
