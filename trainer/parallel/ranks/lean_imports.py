"""Skip heavy imports that training never uses: torch's compiler, torchao and SciPy.

When imported, bitsandbytes (0.50.2; PEFT imports it for any adapter) applies torch.compile to two functions of its CPU
backend, and DeepSpeed (0.19.8) to three functions of its Muon optimizer. This imports Inductor, which takes longer than
importing torch. These functions are compiled on their first call instead.

If torchao is installed (for `training.qat`), transformers (5.23.0), PEFT (0.21.2) and diffusers (0.42.1) import it, and
thereby Inductor, only to test for its tensor subclasses, which cannot exist before torchao has been imported. If SciPy
is installed, transformers imports it for object detection losses, which no run uses.
"""

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trainer.contract.known_versions import patch_attribute, replaces

LAZILY_COMPILED_MODULES = ("bitsandbytes", "deepspeed.runtime.zero.muon.original_muon")
_LOSSES = ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
AVAILABILITY_CHECKS = {
    "transformers.quantizers.quantizer_torchao": ("transformers.utils", "torchao"),
    "peft.tuners.lora.torchao": ("peft.import_utils", "torchao"),
    "peft.utils.quantization_utils": ("peft.import_utils", "torchao"),
    "diffusers.quantizers.torchao.torchao_quantizer": ("diffusers.utils", "torchao"),
    **{f"transformers.loss.loss_{name}": ("transformers.utils", "scipy") for name in _LOSSES},
}
"""Module -> (module from which it imports `is_PACKAGE_available`, PACKAGE)."""
COMMON_MODULES = (
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "deepspeed",
    "peft",
)
"""Modules that import most other modules of a run, such as torch's DTensor, its compiler's front end, and SymPy."""


class _Finder(MetaPathFinder):
    """Import finder that patches modules in LAZILY_COMPILED_MODULES or AVAILABILITY_CHECKS while they run."""

    def __init__(self) -> None:
        self._wanted = {name for name in (*LAZILY_COMPILED_MODULES, *AVAILABILITY_CHECKS) if name not in sys.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._wanted:
            return None
        self._wanted.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # an instance for this module only
            loader.exec_module = partial(_execute, loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    if module.__name__ in AVAILABILITY_CHECKS:
        owner, package = AVAILABILITY_CHECKS[module.__name__]
        name = f"is_{package}_available"
        is_installed = getattr(sys.modules[owner], name)
        check = lambda: package in sys.modules and is_installed()  # noqa: E731
        patch = patch_attribute(sys.modules[owner], name, check, "transformers")
    else:
        import torch

        patch = patch_attribute(torch, "compile", partial(_compile_on_first_call, torch.compile), "torch")
    with patch:
        execute(module)


@replaces("`torch.compile` while bitsandbytes and DeepSpeed's Muon are imported")
@replaces("`is_torchao_available` while the torchao modules of transformers, PEFT and diffusers are imported")
@replaces("`is_scipy_available` while transformers' object detection losses are imported")
def hook_imports() -> None:
    """Install the import hook; modules that are already imported are unaffected."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def import_common_modules() -> None:
    """Import `COMMON_MODULES`, freeze all objects, and then enable the garbage collector.

    The imports create half a million permanent objects; scanning them repeatedly would take a fifth of the import time.
    """
    for name in COMMON_MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _compile_on_first_call(compile: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    if function is None:
        return partial(_compile_on_first_call, compile, **options)
    compiled = cache(lambda: compile(function, **options))

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return compiled()(*arguments, **keywords)

    return call
