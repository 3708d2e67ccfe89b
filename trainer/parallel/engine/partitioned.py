"""What DeepSpeed's stage 3 adds to the parameters that it partitions; no other file spells these attributes.

Read in DeepSpeed 0.19.8, runtime/zero/partition_parameters.py (`_convert_to_deepspeed_param`).
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.contract.known_versions import changed, require


def is_partitioned(parameter: Tensor) -> bool:
    """Whether stage 3 has taken the parameter over; it may be gathered at the moment."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of all of a parameter, also where this rank holds only a share of it."""
    return torch.Size(_of(parameter, "ds_shape")) if is_partitioned(parameter) else parameter.shape


def whole_size(parameter: Tensor) -> int:
    """The number of elements of all of a parameter."""
    return whole_shape(parameter).numel()


def is_whole_here(parameter: Tensor) -> bool:
    """False where this rank has only its share, or the rest is still on its way."""
    return not is_partitioned(parameter) or _of(parameter, "ds_status").name == "AVAILABLE"


def own_share(parameter: Tensor) -> Tensor:
    """This rank's part of a partitioned parameter, flat; the last ranks' parts are padded."""
    share: Tensor = _of(parameter, "ds_tensor")
    return share


def sharing_group(parameter: Tensor) -> Any:
    """The process group over which a partitioned parameter is spread."""
    return _of(parameter, "ds_process_group")


def require_partitioned(parameters: Iterable[Tensor]) -> None:
    """UserError unless stage 3 has marked them all: without the mark shares would pass as whole parameters."""
    if not all(map(is_partitioned, parameters)):
        raise changed("deepspeed", "stage 3 leaves trained parameters without `ds_id`")


def keep_own_values(parameter: Tensor) -> None:
    """Mark a weight that differs between ranks: DeepSpeed's engine shall not broadcast rank 0's over it."""
    parameter.ds_optim_param = True  # type: ignore[attr-defined]


def require_own_values_kept() -> None:
    """UserError where DeepSpeed's broadcast no longer asks for that mark."""
    from deepspeed import DeepSpeedEngine

    broadcast = require(DeepSpeedEngine, "_broadcast_model", "deepspeed")
    if "ds_optim_param" not in inspect.getsource(broadcast):
        raise changed("deepspeed", "its broadcast of the model passes over no weight marked `ds_optim_param`")


def _of(parameter: Tensor, name: str) -> Any:
    return require(parameter, name, "deepspeed")
