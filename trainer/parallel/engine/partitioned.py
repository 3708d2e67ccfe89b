"""Read the attributes that DeepSpeed's stage 3 adds to partitioned parameters; no other file uses them.

See DeepSpeed 0.19.8, runtime/zero/partition_parameters.py (`_convert_to_deepspeed_param`).
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.contract.known_versions import build_api_error, require


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether stage 3 manages the parameter, even if it is currently gathered."""
    return hasattr(parameter, "ds_id")


def get_full_shape(parameter: Tensor) -> torch.Size:
    return torch.Size(require(parameter, "ds_shape", "deepspeed")) if is_partitioned(parameter) else parameter.shape


def get_full_size(parameter: Tensor) -> int:
    return get_full_shape(parameter).numel()


def is_gathered(parameter: Tensor) -> bool:
    """Return whether this rank has the full parameter, with no all-gather in flight."""
    return not is_partitioned(parameter) or require(parameter, "ds_status", "deepspeed").name == "AVAILABLE"


def get_local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's flat shard of a partitioned parameter, padded to the same size on all ranks."""
    return require(parameter, "ds_tensor", "deepspeed")


def get_partition_group(parameter: Tensor) -> Any:
    return require(parameter, "ds_process_group", "deepspeed")


def require_partitioned(parameters: Iterable[Tensor]) -> None:
    """Raise UserError if a parameter lacks stage 3's `ds_id`, without which a shard looks like the full parameter."""
    if not all(map(is_partitioned, parameters)):
        raise build_api_error("deepspeed", "stage 3 leaves trained parameters without `ds_id`")


def exclude_from_broadcast(parameter: Tensor) -> None:
    """Mark a weight that differs between ranks, so that DeepSpeed's engine does not overwrite it with rank 0's."""
    parameter.ds_optim_param = True  # type: ignore[attr-defined]


def require_broadcast_exclusion() -> None:
    """Raise UserError if the installed DeepSpeed broadcasts weights marked by `exclude_from_broadcast`."""
    from deepspeed import DeepSpeedEngine

    broadcast = require(DeepSpeedEngine, "_broadcast_model", "deepspeed")
    if "ds_optim_param" not in inspect.getsource(broadcast):
        raise build_api_error("deepspeed", "its broadcast of the model does not skip weights marked `ds_optim_param`")
