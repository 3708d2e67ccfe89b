"""Select the implementation for CUDA tensors: our kernels or the reference. CPU tensors always use the reference."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from ops import experts_kernels
from ops.derivative import REFERENCE

_logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    name: Literal["cuda", "reference"]
    reason: str


_loaded: Backend | None = None
_library: torch.library.Library | None = None


def load_backend(backend: Literal["auto", "cuda", "reference"] = "auto") -> Backend:
    """Register the operators for CUDA tensors, once per process; `auto` selects the kernels if they can be built.

    Raises ValueError if `cuda` is unavailable, if a build fails unexpectedly, or if another backend is loaded.
    """
    global _loaded
    if backend not in ("auto", "cuda", "reference"):
        raise ValueError(f"ops.backend={backend}: expected auto, cuda or reference")
    if _loaded is not None:
        if backend in ("auto", _loaded.name):
            return _loaded
        raise ValueError(f"ops.backend={backend}: {_loaded.name} is already loaded ({_loaded.reason}); use one backend")
    if backend == "reference":
        _loaded = _use_reference("requested")
    else:
        from ops.builder import LoraOpBuilder  # imports deepspeed, which takes seconds
        from ops.toolkit import BuildError

        try:
            builder = LoraOpBuilder()
            builder.load()
            _implement({"experts_forward": experts_kernels.forward, "experts_backward": experts_kernels.backward})
            _loaded = Backend("cuda", f"kernels in {builder.origin}")
        except BuildError as error:
            # A failed build on a machine with all prerequisites is a bug: `auto` must not hide it by falling back.
            if backend == "cuda" or error.unexpected:
                raise ValueError(f"ops.backend={backend}: {error}") from error
            _loaded = _use_reference(str(error))
    _logger.info("LoRA operators: %s (%s)", _loaded.name, _loaded.reason)
    return _loaded


def predict_backend(backend: Literal["auto", "cuda"]) -> str:
    """Predict which backend `load_backend` will choose if the build succeeds, without building the operators."""
    if _loaded is not None:
        return _loaded.name
    from ops.builder import LoraOpBuilder

    builder = LoraOpBuilder()
    can_run = torch.cuda.is_available() and (builder.find() is not None or builder.is_compatible())
    return "cuda" if backend == "cuda" or can_run else "reference"


def check_kernels_available() -> None:
    """Check, without building, that the kernels can be found or built. Raises ValueError if not."""
    from ops.builder import LoraOpBuilder

    builder = LoraOpBuilder()
    if _loaded is None and builder.find() is None and not builder.is_compatible():
        raise ValueError(f"ops.backend=cuda: {builder.error_log}")


def get_loaded_backend() -> Backend | None:
    return _loaded


def _use_reference(reason: str) -> Backend:
    _implement(REFERENCE)
    return Backend("reference", reason)


def _implement(functions: Mapping[str, Callable[..., Any]]) -> None:
    global _library
    _library = torch.library.Library("zerolora", "IMPL")  # its garbage collection would undo the registrations
    for name, function in functions.items():
        _library.impl(name, function, "CUDA")
