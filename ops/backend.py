"""Which code runs for CUDA tensors: our kernels, or the reference. CPU tensors always run the reference."""

import logging
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from ops import eight_bit, elementwise, experts, experts_kernels, lora, nf4, plain

# Hopper: the only generation that the kernels ran on.
TIMED = 9
_logger = logging.getLogger(__name__)
_REFERENCE: dict[str, Callable[..., Any]] = {
    "lora_forward": lora.reference_forward,
    "lora_backward": lora.reference_backward,
    "nf4_forward": nf4.reference_forward,
    "nf4_backward": nf4.reference_backward,
    "dequantize_nf4": nf4.reference_dequantize,
    "adapter_backward_": plain.reference_adapter_backward_,
    "rank_pass": plain.reference_rank_pass,
    "rank_expand": plain.reference_rank_expand,
    "frozen_product": plain.reference_frozen_product,
    **eight_bit.REFERENCE,
    **elementwise.REFERENCE,
    **experts.REFERENCE,
}


class Backend(NamedTuple):
    name: Literal["cuda", "reference"]
    reason: str


_loaded: Backend | None = None
_library: torch.library.Library | None = None
_compilers: list["subprocess.Popen[bytes]"] = []


def load(backend: Literal["auto", "cuda", "reference"] = "auto", verbose: bool = False) -> Backend:
    """Makes the operators run for CUDA tensors, once a process; `auto` takes the kernels where they can be built.

    Raises:
        ValueError: `cuda` is asked for and cannot be built or loaded; or another backend is loaded already.
    """
    global _loaded
    if backend not in ("auto", "cuda", "reference"):
        raise ValueError(f"ops.backend={backend}: expected auto, cuda or reference")
    if _loaded is not None:
        if backend in ("auto", _loaded.name):
            return _loaded
        raise ValueError(f"ops.backend={backend}: this process has loaded {_loaded.name} already ({_loaded.reason})")
    if backend == "reference":
        _loaded = _use_reference("asked for")
    else:
        from ops.builder import LoraOpBuilder  # here: it imports deepspeed, which takes seconds
        from ops.toolkit import BuildError

        try:
            builder = LoraOpBuilder()
            builder.load(verbose=verbose)
            _implement({"experts_forward": experts_kernels.forward, "experts_backward": experts_kernels.backward})
            _loaded = Backend("cuda", f"kernels {builder.origin}{untimed(torch.cuda.get_device_capability())}")
        except BuildError as error:
            # A build that fails on a machine that has everything for it is a defect and must not pass as a choice.
            if backend == "cuda" or error.unexpected:
                raise ValueError(f"ops.backend={backend}: {error}") from error
            _loaded = _use_reference(str(error))
    _logger.info("LoRA operators: %s (%s)", _loaded.name, _loaded.reason)
    return _loaded


def expected(backend: Literal["auto", "cuda"]) -> str:
    """The name of what `load` will choose unless a build fails, without waiting for one."""
    if _loaded is not None:
        return _loaded.name
    from ops.builder import LoraOpBuilder

    return "cuda" if backend == "cuda" or LoraOpBuilder().can_run() else "reference"


def build_beside(backend: Literal["auto", "cuda"]) -> None:
    """Begin to compile the kernels in a process of its own where none are; `load` waits for it.

    Raises:
        ValueError: `cuda` is asked for and cannot be built.
    """
    from ops.builder import LoraOpBuilder

    if _loaded is not None or _compilers:
        return
    builder = LoraOpBuilder()
    if not builder.lies_ready():
        if builder.is_compatible():
            _compilers.append(builder.start_compiler())
        elif backend == "cuda":
            raise ValueError(f"ops.backend=cuda: {builder.error_log}")


def loaded() -> Backend | None:
    """What `load` chose in this process, None before it ran."""
    return _loaded


def untimed(capability: tuple[int, int]) -> str:
    """What to add where the kernels were compiled and tested for a card, but not timed on one of its kind."""
    return "" if capability[0] == TIMED else f", untimed on compute capability {capability[0]}.{capability[1]}"


def _use_reference(reason: str) -> Backend:
    _implement(_REFERENCE)
    return Backend("reference", reason)


def _implement(functions: Mapping[str, Callable[..., Any]]) -> None:
    global _library
    _library = torch.library.Library("zerolora", "IMPL")  # kept: its registrations end with it
    for name, function in functions.items():
        _library.impl(name, function, "CUDA")
