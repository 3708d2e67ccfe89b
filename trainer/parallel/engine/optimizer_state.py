"""Save and restore the fp32 optimizer state of a DeepSpeed engine, for any stage and number of ranks.

DeepSpeed keeps master weights and moments in flat partitions, which depend on stage and rank count. A `Shard` is the
position of one trained tensor in this rank's partition. A rank saves its own partitions and these positions
(`StatePieces`), without communication; the reader reassembles the tensors by name, for any partitioning. Based on
DeepSpeed 0.19.8: stage_1_and_2.py (`_hp_mapping`), stage3.py (`grad_position`), fp16/unfused_optimizer.py
(`fp32_groups`). docs/decisions/09-checkpoints.md explains why `deepspeed.utils.safe_get_full_*` and
`safe_set_full_*` are not used.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from trainer.config.training_sections import OPTIMIZERS
from trainer.contract.known_versions import require
from trainer.parallel.engine.flat_adapter import find_flat_adapter, list_trained_parameters
from trainer.parallel.engine.optimizer import AVERAGING_KEY, AVERAGING_STATE_KEYS
from trainer.parallel.engine.partitioned import get_full_shape, get_full_size
from trainer.parallel.engine.protocol import Engine

NamedParameter = tuple[str, torch.nn.Parameter]
StateTensors = dict[str, torch.Tensor]
# bitsandbytes' names for the two 8-bit moments, their scales and codebooks; a scale covers 256 elements.
EIGHT_BIT_STATE_KEYS = (("state1", "absmax1", "qmap1"), ("state2", "absmax2", "qmap2"))
BLOCK_SIZE = 256


@dataclass(frozen=True)
class Shard:
    """Maps a range of a trained tensor to a range of a partition, both of `length` elements.

    The ranges start at `param_start` in the flattened tensor and at `partition_start` in `partition`.
    """

    name: str
    partition: torch.Tensor
    partition_start: int
    param_start: int
    length: int


@dataclass(frozen=True)
class StatePieces:
    """One rank's state: flat tensors "master/0", "exp_avg/0", ... by partition number.

    A moment that differs in size from its master weights belongs to one unsharded tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    shards: list[list[Any]]
    """[name, partition, start in the partition, start in the tensor, elements] for each shard."""
    shapes: dict[str, list[int]]
    """Shapes of the trained tensors that have a shard on this rank."""

    def build_metadata(self) -> dict[str, str]:
        return {"pieces": json.dumps({"shards": self.shards, "shapes": self.shapes})}

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> "StatePieces":
        return cls(tensors, **json.loads(metadata["pieces"]))


def assemble_state(parts: Iterable[StatePieces]) -> dict[str, torch.Tensor]:
    """Return the full state of all trained tensors as {"master/NAME", "exp_avg/NAME", ...}, fp32, on the CPU."""
    state: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, partition, partition_start, start, length in part.shards:
            size = len(part.tensors[f"master/{partition}"])
            for quantity in {key.partition("/")[0] for key in part.tensors}:
                piece = part.tensors[f"{quantity}/{partition}"]
                if len(piece) != size:
                    state[f"{quantity}/{name}"] = piece
                    continue
                piece = piece.narrow(0, partition_start, length)
                if f"{quantity}/{name}" not in state:
                    state[f"{quantity}/{name}"] = torch.zeros(part.shapes[name], dtype=piece.dtype)
                state[f"{quantity}/{name}"].view(-1).narrow(0, start, length).copy_(piece)
    return state


class EngineState:
    """Reads and restores master weights and optimizer moments by parameter name. All calls are collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._optimizer = engine.basic_optimizer
        name = type(self._optimizer).__name__
        self._kind = next(kind for kind in OPTIMIZERS.values() if kind.path.rpartition(".")[2] == name)
        self._eight_bit = dict(zip(self._kind.state, EIGHT_BIT_STATE_KEYS, strict=False))
        self._trained: list[NamedParameter] = list_trained_parameters(engine.module)
        if engine.zero_optimization_stage() == 3:
            partitions = engine.optimizer.fp32_partitioned_groups_flat
        else:
            partitions = [partition for group in self._optimizer.param_groups for partition in group["params"]]
        by_id: dict[int, torch.Tensor] = {id(partition): partition for partition in partitions}
        self._partitions = list(by_id.values())
        self._shards = [shard for shard in _find_shards(engine, self._trained) if id(shard.partition) in by_id]

    def collect_pieces(self) -> StatePieces | None:
        """Return this rank's state on its device: views of the tensors, and copies of 8-bit moments.

        At stage 0 all ranks have the same state, and only rank 0 returns it.
        """
        if not self._engine.zero_optimization_stage() and self._engine.global_rank:
            return None
        tensors = {
            f"{quantity}/{number}": values.float()
            for number, partition in enumerate(self._partitions)
            for quantity, values in self._read_state(partition).items()
        }
        shards = self._list_positions()
        names = {name for name, *_ in shards}
        shapes = {name: list(get_full_shape(parameter)) for name, parameter in self._trained if name in names}
        return StatePieces(tensors, shards, shapes)

    def _list_positions(self) -> list[list[Any]]:
        numbers = {id(partition): number for number, partition in enumerate(self._partitions)}
        shards = (shard for shard in self._shards if shard.length)
        return [[s.name, numbers[id(s.partition)], s.partition_start, s.param_start, s.length] for s in shards]

    def find_mismatch(self, state: dict[str, torch.Tensor]) -> str | None:
        for name, parameter in self._trained:
            saved = state.get(f"master/{name}")
            if saved is None:
                return f"it has no {name}"
            if saved.shape != get_full_shape(parameter):
                return f"its {name} has shape {list(saved.shape)}, not {list(get_full_shape(parameter))}"
            if missing := [key for key in self._kind.state if f"{key}/{name}" not in state]:
                return f"it has no optimizer state {missing[0]}, which training.optimizer needs"
        more = len([name for name in state if name.startswith("master/")]) - len(self._trained)
        return f"it has {more} more trained tensors than this run" if more else None

    def restore(self, state: dict[str, torch.Tensor], steps: int) -> bool:
        """Restore `state` (from `assemble_state`, after `steps` optimizer steps) in the optimizer and the model.

        Returns False if 8-bit moments had to be quantized again.
        """
        if steps:
            self._create_moments(steps)
        partition_states = {id(partition): self._read_state(partition) for partition in self._partitions}
        for shard in self._shards:
            target = partition_states[id(shard.partition)]
            for quantity in target if steps else ("master",):
                saved = state[f"{quantity}/{shard.name}"].reshape(-1)
                if len(target[quantity]) != len(target["master"]):  # a moment of one unsharded tensor
                    target[quantity].copy_(saved)
                    continue
                piece = saved.narrow(0, shard.param_start, shard.length)
                target[quantity].narrow(0, shard.partition_start, shard.length).copy_(piece)
        exact = True
        for partition in self._partitions:
            entry = self._optimizer.state.get(partition, {})
            for quantity, names in self._eight_bit.items():
                if names[0] in entry and entry[names[0]].dtype == torch.uint8:
                    from bitsandbytes.functional import quantize_blockwise

                    values, scales, codes = (entry[name] for name in names)
                    moment = partition_states[id(partition)][quantity]
                    packed, state_8bit = quantize_blockwise(moment, codes, blocksize=BLOCK_SIZE)
                    values.copy_(packed.view_as(values))
                    scales.copy_(state_8bit.absmax)
                    exact &= not moment.any()
        self._refresh_working_copies(state)
        return exact

    def collect_8bit_moments(self) -> dict[str, torch.Tensor]:
        """Return this rank's 8-bit moments, valid only for the same partitioning; empty if the moments are fp32."""
        moments = {
            f"{index}/{key}": value.detach()
            for index, partition in enumerate(self._partitions)
            for entry in [self._optimizer.state.get(partition, {})]
            for key, value in entry.items()
            if torch.is_tensor(value) and key in ("state1", "state2", "absmax1", "absmax2")
            if entry["state1"].dtype == torch.uint8
        }
        return moments | {"positions": self._hash_positions()} if moments else {}

    def restore_8bit_moments(self, raw: dict[str, torch.Tensor]) -> bool:
        """Restore this rank's 8-bit moments. If the partitioning differs, change nothing and return False."""
        if raw and not torch.equal(raw["positions"], self._hash_positions()):
            return False
        for name in raw.keys() - {"positions"}:
            index, key = name.split("/")
            self._optimizer.state[self._partitions[int(index)]][key].copy_(raw[name])
        return True

    def _hash_positions(self) -> torch.Tensor:
        return torch.tensor(xxhash.xxh3_64_intdigest(json.dumps(self._list_positions()).encode()) >> 1)  # fits an int64

    def read_averaging_state(self) -> list[dict[str, float]]:
        """Return Schedule-Free's averaging state for each parameter group; an empty list for other optimizers."""
        groups = [group for group in self._optimizer.param_groups if AVERAGING_KEY in group]
        return [{name: group[name] for name in AVERAGING_STATE_KEYS} for group in groups]

    def restore_averaging_state(self, averages: list[dict[str, float]]) -> None:
        for group, counted in zip(self._optimizer.param_groups, averages, strict=False):
            group.update(counted)

    def count_steps_taken(self) -> int:
        """Return the number of optimizer steps taken: 0 without moments, 1 with moments but without a step count."""
        counted = max(group.get("k", 1) for group in self._optimizer.param_groups)
        entries = [entry for partition in self._partitions if (entry := self._optimizer.state.get(partition))]
        steps = [entry.get("step", counted) for entry in entries]
        return max((int(float(step)) for step in steps), default=0)

    def _read_state(self, partition: torch.Tensor) -> StateTensors:
        """Return a partition's weights and moments as flat views; 8-bit moments are dequantized copies."""
        entry = self._optimizer.state.get(partition, {})
        state = {"master": partition.detach().reshape(-1)}
        for quantity, (values, scales, codes) in self._eight_bit.items():
            if quantity in entry:
                state[quantity] = entry[quantity].reshape(-1)
            elif values not in entry:
                state[quantity] = torch.zeros_like(state["master"])
            elif entry[values].dtype == torch.uint8:
                from bitsandbytes.functional import dequantize_blockwise

                packed = entry[values].reshape(-1).to(partition.device)
                state[quantity] = dequantize_blockwise(packed, None, entry[scales], entry[codes], blocksize=BLOCK_SIZE)
            else:  # bitsandbytes keeps small tensors in fp32
                state[quantity] = entry[values].reshape(-1)
        return state

    def _create_moments(self, steps: int) -> None:
        for group_index, group in enumerate(self._optimizer.param_groups):
            for partition in self._list_group_partitions(group_index, group):
                if self._kind.library == "bitsandbytes":
                    init_state = require(self._optimizer, "init_state", "bitsandbytes")
                    members, group["params"] = group["params"], [partition]  # init_state looks up its parameter here
                    init_state(group, partition, group_index, 0)
                    group["params"] = members
                    self._optimizer.state[partition]["step"] = steps
                else:
                    on_device = group.get("fused") or group.get("capturable")
                    step = torch.tensor(float(steps), device=partition.device if on_device else "cpu")
                    sizes = {"row_var": (*partition.shape[:1], 1), "col_var": (1, *partition.shape[1:])}
                    moments = {name: partition.new_zeros(sizes.get(name, partition.shape)) for name in self._kind.state}
                    self._optimizer.state[partition] = moments | ({} if "k" in group else {"step": step})

    def _list_group_partitions(self, group_index: int, group: dict[str, Any]) -> list[torch.Tensor]:
        """Return a parameter group's flat partitions. At stage 3 the group itself lists them only during a step."""
        if self._engine.zero_optimization_stage() < 3:
            return list(group["params"])
        zero = self._engine.optimizer
        to_group = zero.sub_group_to_group_id
        return [flat for i, flat in enumerate(zero.fp32_partitioned_groups_flat) if to_group[i] == group_index]

    def _refresh_working_copies(self, state: dict[str, torch.Tensor]) -> None:
        import deepspeed

        partitioned = self._engine.zero_optimization_stage() == 3
        for name, parameter in self._trained:
            value = state[f"master/{name}"].to(self._engine.device, parameter.dtype)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
                parameter.data.copy_(value.view_as(parameter.data))


def _find_shards(engine: Engine, trained: list[NamedParameter]) -> Iterator[Shard]:
    flat = find_flat_adapter(engine.module)
    if flat is None:
        yield from _list_shards(engine, trained)
        return
    spans = flat.list_spans()
    buffers = [(f"{index}", buffer) for index, buffer in enumerate(flat.buffers)]
    buffer_shards = {int(shard.name): shard for shard in _list_shards(engine, buffers)}
    for name, (buffer, start, length) in spans.items():
        shard = buffer_shards.get(buffer)
        if shard is None:
            continue
        first = max(start, shard.param_start)
        end = min(start + length, shard.param_start + shard.length)
        if first < end:
            partition_start = shard.partition_start + first - shard.param_start
            yield Shard(name, shard.partition, partition_start, first - start, end - first)
    yield from _list_shards(engine, [(name, parameter) for name, parameter in trained if name not in spans])


def _list_shards(engine: Engine, trained: list[NamedParameter]) -> Iterator[Shard]:
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    if stage == 0:
        master = _find_stage_0_masters(optimizer)
        for name, parameter in trained:
            yield Shard(name, master.get(id(parameter), parameter), 0, 0, parameter.numel())
    elif stage == 3:
        for name, parameter in trained:
            group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            param_start = min(length * engine.global_rank, get_full_size(parameter))
            # The last rank's partition is padded.
            length = min(length, get_full_size(parameter) - param_start)
            yield Shard(name, optimizer.fp32_partitioned_groups_flat[group], start, param_start, length)
    else:
        for name, parameter in trained:
            mapping = require(parameter, "_hp_mapping", "deepspeed")
            if mapping is not None:  # None if this rank's partition has no part of the tensor
                partition = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
                part, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Shard(name, partition, part.start, whole.start, part.numel)


def _find_stage_0_masters(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return stage 0's fp32 master weights by the id of their 16-bit parameter; empty in fp32 training."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return {}
    pairs = zip(
        require(optimizer, "fp16_groups", "deepspeed"), require(optimizer, "fp32_groups", "deepspeed"), strict=True
    )
    return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
