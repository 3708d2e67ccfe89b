"""Build the CUDA operators through DeepSpeed's op builder, and list them with DeepSpeed's own.

    python -m ops.builder list                        DeepSpeed's operators and ours: compatible, installed
    python -m ops.builder build [--clean] [--verbose] compile ahead of time instead of at startup
    python -m ops.builder build --arch 9.0 --into DIR compile into a folder shared by all users of one or more nodes
    ZEROLORA_BUILD_OPS=1 pip install -e .             compile during installation

DeepSpeed has no hook for third-party operators (its `all_ops.py` scans its own folder), so `register` adds ours to its
table.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import deepspeed
import torch
from deepspeed.ops.op_builder import builder as deepspeed_builder
from torch.utils import cpp_extension

from ops import prebuilt
from ops.toolkit import (
    BuildError,
    build_gencode_flag,
    build_ptx_flags,
    check_toolkit,
    find_toolkit_version,
    format_architecture,
    list_architectures,
    parse_architectures,
    resolve_architecture,
)

CSRC = Path(__file__).resolve().parent / "csrc"


class LoraOpBuilder(deepspeed_builder.CUDAOpBuilder):
    """DeepSpeed builder for `zerolora_lora`: compiles the kernels of ops/csrc for the GPUs of this node."""

    BUILD_VAR = "ZEROLORA_BUILD_OPS"
    NAME = "zerolora_lora"

    def __init__(self, architectures: Sequence[str] | None = None) -> None:
        super().__init__(name=self.NAME)
        self._architectures = list(architectures) if architectures is not None else None
        self.origin = ""
        """Folder of the loaded build, for messages."""

    def absolute_name(self) -> str:
        return f"ops.built.{self.NAME}"

    def sources(self) -> list[str]:
        return sorted(str(path) for pattern in ("*.cpp", "*.cu") for path in CSRC.rglob(pattern))

    def include_paths(self) -> list[str]:
        return sorted(str(path) for path in CSRC.iterdir())  # headers are included by bare name

    def cxx_args(self) -> list[str]:
        return ["-O3", self._choose_cxx_standard(), *build_ptx_flags(self._architectures or ())]

    def nvcc_args(self) -> list[str]:
        # Replaces DeepSpeed's flags, which add --use_fast_math and never emit sm_90a.
        names = self._choose_architectures()
        hopper = ["-DZEROLORA_HOPPER"] if "90a" in names else []
        threads = f"--threads={min(os.cpu_count() or 1, 8)}"
        return ["-O3", self._choose_cxx_standard(), threads, *hopper, *(build_gencode_flag(name) for name in names)]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the operators can be built and, if a CUDA context exists, run; set `error_log` if not."""
        try:
            self.check()
        except BuildError as error:
            self.error_log = str(error)
            if verbose:
                self.warning(f"{self.NAME}: {error}")
            return False
        return True

    def check(self) -> tuple[int, int]:
        """Return the toolkit's version. Raises BuildError if the operators cannot be built or run."""
        if torch.version.cuda is None:
            raise BuildError(
                f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch, or set"
                " ops.backend: reference"
            )
        toolkit = find_toolkit_version()
        check_toolkit(toolkit, torch.version.cuda)
        # Creating a CUDA context here would break forked workers, so check the GPU only if one exists.
        if torch.cuda.is_initialized():
            resolve_architecture(torch.cuda.get_device_capability(), toolkit)
        return toolkit

    def load(self, verbose: bool = False) -> ModuleType:
        """Load the build that `find` returns, or compile one into the cache, and return its module.

        Raises BuildError if the operators cannot be built or loaded.
        """
        loaded_modules: dict[str, ModuleType] | None = getattr(deepspeed_builder.OpBuilder, "_loaded_ops", None)
        if loaded_modules is None:
            problem = f"deepspeed {deepspeed.__version__}: OpBuilder has no `_loaded_ops`"
            raise BuildError(f"{problem}; install the version in constraints.txt", unexpected=True)
        if self.NAME not in loaded_modules:
            if not torch.cuda.is_available():
                self.check()
                raise BuildError("no CUDA device is visible; set ops.backend=reference")
            torch.cuda.init()
            library = self.find()
            if library is None:
                self._architectures = self._choose_architectures()
                library, module = self.build_into(prebuilt.get_cache_folder(), verbose)
            else:
                module = self._import(library)
            self.origin = str(library.parent)
            loaded_modules[self.NAME] = module
        return loaded_modules[self.NAME]

    def build_into(self, folder: Path, verbose: bool = False, clean: bool = False) -> tuple[Path, ModuleType]:
        """Compile into `folder` unless it already contains this build; return the library's path and its module.

        Compiles for this builder's architectures, by default those of `list_architectures`; no GPU is needed. The build
        is renamed into place, so other processes never see it incomplete. Raises BuildError if compiling fails.
        """
        toolkit = self.check()
        self._architectures = self._architectures or list_architectures(toolkit)
        version = f"{toolkit[0]}.{toolkit[1]}"
        digest = self._compute_sources_digest()
        build = prebuilt.BuildIdentity(digest, *self._read_versions(), version, tuple(self._architectures))
        with prebuilt.acquire_build_lock(folder / f".{build.name}.lock"):
            if clean:
                shutil.rmtree(folder / build.name, ignore_errors=True)
            library = build.find_library(folder)
            if library is not None:
                return library, self._import(library)
            with prebuilt.create_temporary_folder(folder) as staging:
                module = self._compile(verbose, Path(staging))
                return build.install(Path(staging, f"{self.NAME}.so"), folder), module

    def find(self) -> Path | None:
        """Return the path of a library built from these sources for this Python and torch; None if there is none.

        The library must support this builder's architectures or, if a CUDA context already exists, the node's GPUs.
        Creating a context here would break forked workers.
        """
        architectures = self._architectures
        if architectures is None:
            architectures = self._find_gpu_architectures() if torch.cuda.is_initialized() else []
        return prebuilt.find_build(self._compute_sources_digest(), self._read_versions(), architectures)

    def _compute_sources_digest(self) -> str:
        content = b"".join(path.name.encode() + path.read_bytes() for path in sorted(CSRC.glob("*/*")))
        return hashlib.sha256(content).hexdigest()[:12]

    def _read_versions(self) -> tuple[str, str, str]:
        """Return torch's version, its CUDA version, and Python's version with the machine type."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
        return torch.__version__, str(torch.version.cuda), python

    def _import(self, library: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.NAME, library)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (OSError, ImportError) as error:
            raise BuildError(f"{library}: {error}; remove its folder, or rebuild it with --clean") from error
        return module

    def _compile(self, verbose: bool, folder: Path) -> ModuleType:
        try:
            return cpp_extension.load(
                name=self.NAME,
                sources=self.sources(),
                extra_cflags=self.cxx_args(),
                extra_cuda_cflags=self.nvcc_args(),
                extra_include_paths=self.include_paths(),
                build_directory=str(folder),
                verbose=verbose,
                with_cuda=True,
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise BuildError(f"compiling {self.NAME} in {folder} failed: {error}", unexpected=True) from error

    def _choose_cxx_standard(self) -> str:
        newer = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
        return "-std=c++20" if newer else "-std=c++17"

    def _choose_architectures(self) -> list[str]:
        if self._architectures is not None:
            return self._architectures
        return self._find_gpu_architectures(find_toolkit_version())

    def _find_gpu_architectures(self, toolkit: tuple[int, int] | None = None) -> list[str]:
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return sorted(resolve_architecture(each, toolkit) if toolkit else format_architecture(each) for each in found)


def register() -> LoraOpBuilder:
    """Add our builder to the table that DeepSpeed's report lists, and return the builder."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder = LoraOpBuilder()
    ALL_OPS[builder.NAME] = builder
    return builder


def list_operators() -> None:
    from deepspeed.env_report import op_report
    from deepspeed.git_version_info import installed_ops

    ours = register()
    installed_ops[ours.NAME] = ours.find() is not None
    op_report(verbose=False)
    if not ours.is_compatible():
        print(f"{ours.NAME}: {ours.error_log}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(".*choice: '(.*)' .*", r"\1: not a command of zerolora ops; use list or build", message)
        message = re.sub("unrecognized arguments: (.*)", r"\1: not an argument of this command; remove it", message)
        message = re.sub("argument (.*): expected .*", r"\1: has no value; write one after it", message)
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="zerolora ops", description=str(__doc__).split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="DeepSpeed's operators and ours")
    build = commands.add_parser("build", help="compile ahead of time")
    build.add_argument("--arch", nargs="+", action="extend", metavar="9.0", help="only for these compute capabilities")
    build.add_argument(
        "--into", type=Path, metavar="DIR", help=f"shared folder; runs find it through {prebuilt.OPS_PATH_VARIABLE}"
    )
    build.add_argument("--clean", action="store_true", help="remove earlier builds first")
    build.add_argument("--verbose", action="store_true", help="show the compiler's output")
    options = parser.parse_args(arguments)
    if options.command != "build":
        list_operators()
        return 0
    folder: Path = prebuilt.PACKAGE_BUILDS_FOLDER if options.into is None else options.into.absolute()
    try:
        builder = LoraOpBuilder(parse_architectures(options.arch) if options.arch else None)
        print(builder.build_into(folder, verbose=options.verbose, clean=options.clean)[0])
        if options.into is not None:
            print(f"to use it in runs, set {prebuilt.OPS_PATH_VARIABLE}={folder}")
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
