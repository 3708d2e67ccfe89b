"""Builds the CUDA operators through DeepSpeed's op builder, and lists them beside DeepSpeed's own.

    python -m ops.builder list                        DeepSpeed's operators and ours: compatible, installed
    python -m ops.builder build [--clean] [--verbose] compile now, so that no rank has to
    python -m ops.builder build --arch 9.0 --into DIR the same into a folder that all users of a node, or of many, share
    ZEROLORA_BUILD_OPS=1 pip install -e .             the same at install

DeepSpeed has no hook for operators of others (its `all_ops.py` scans its own folder): `register` adds ours to its
table.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import builder as deepspeed_builder
from torch.utils import cpp_extension

from ops import prebuilt
from ops.build_lock import build_lock
from ops.toolkit import (
    BuildError,
    all_architectures,
    architecture,
    capability_of_ptx,
    check_capability,
    check_toolkit,
    gencode,
    named_architectures,
    toolkit_version,
)

CSRC = Path(__file__).resolve().parent / "csrc"
BUILT = CSRC.parent / "built"


class LoraOpBuilder(deepspeed_builder.CUDAOpBuilder):
    """DeepSpeed's builder for `zerolora_lora`: kernels of ops/csrc, compiled for the cards of this node."""

    BUILD_VAR = "ZEROLORA_BUILD_OPS"
    NAME = "zerolora_lora"

    def __init__(self, architectures: Sequence[str] | None = None) -> None:
        super().__init__(name=self.NAME)
        self._architectures = list(architectures) if architectures is not None else None
        self.origin = "built for this card"
        """Where the loaded module comes from, in words."""

    def absolute_name(self) -> str:
        return f"ops.built.{self.NAME}"

    def sources(self) -> list[str]:
        return sorted(str(path) for pattern in ("*.cpp", "*.cu") for path in CSRC.rglob(pattern))

    def include_paths(self) -> list[str]:
        return sorted(str(path) for path in CSRC.iterdir())  # files include each other by name

    def cxx_args(self) -> list[str]:
        return ["-O3", self._standard(), *capability_of_ptx(self._architectures or ())]

    def nvcc_args(self) -> list[str]:
        # Not DeepSpeed's: it adds --use_fast_math, and never emits sm_90a.
        names = self._names()
        hopper = ["-DZEROLORA_HOPPER"] if "90a" in names else []
        threads = f"--threads={min(os.cpu_count() or 1, 8)}"
        return ["-O3", self._standard(), threads, *hopper, *(gencode(name) for name in names)]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether nvcc, torch and (where a CUDA context exists already) the card can build and run it."""
        try:
            self.check()
        except BuildError as error:
            self.error_log = str(error)
            if verbose:
                self.warning(f"{self.NAME}: {error}")
            return False
        return True

    def check(self) -> tuple[int, int]:
        """The toolkit's version; BuildError with the fix where the operators cannot be built or run."""
        if torch.version.cuda is None:
            raise BuildError(
                f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or set"
                " ops.backend: reference"
            )
        toolkit = toolkit_version()
        check_toolkit(toolkit, torch.version.cuda)
        # Creating a context here would poison forked workers: the card is looked at only once one exists.
        if torch.cuda.is_initialized():
            check_capability(torch.cuda.get_device_capability(), toolkit)
        return toolkit

    def load(self, verbose: bool = False) -> ModuleType:
        """The loaded module: built ahead of time, for all or by an earlier process, or compiled now behind a lock.

        Raises BuildError where it cannot be built, or the compiler failed.
        """
        known: dict[str, ModuleType] = _inside(deepspeed_builder.OpBuilder, "_loaded_ops")
        if self.NAME not in known:
            module = self._prebuilt() or self._shared()
            if module is None:
                self.check()
                if not torch.cuda.is_available():
                    raise BuildError("no CUDA device is visible, and CPU tensors always run the reference")
                module = self._cached() or self._compile_once(verbose)
            known[self.NAME] = module
        return known[self.NAME]

    def build(self, verbose: bool = False, clean: bool = False) -> Path:
        """Compiles ahead of time for every architecture the toolkit knows (no GPU needed); returns the library.

        Raises:
            BuildError: it cannot be built here, or the compiler failed.
        """
        toolkit = self.check()
        if clean:
            shutil.rmtree(BUILT, ignore_errors=True)
            shutil.rmtree(self.cache_dir(), ignore_errors=True)
        digest = self.digest()
        self._architectures = self._architectures or all_architectures(toolkit)
        with build_lock(BUILT / "node.lock"):
            (BUILT / "digest").unlink(missing_ok=True)
            self._compile(verbose, BUILT)
            (BUILT / "digest").write_text(digest)
        return BUILT / f"{self.NAME}.so"

    def build_into(self, folder: Path, verbose: bool = False, clean: bool = False) -> Path:
        """Compiles for the architectures into a folder that others share, unless it has that build; the library.

        A build is whole or not there: it is renamed into place.

        Raises:
            BuildError: it cannot be built here, or the compiler failed.
        """
        toolkit = self.check()
        self._architectures = self._architectures or all_architectures(toolkit)
        version = f"{toolkit[0]}.{toolkit[1]}"
        build = prebuilt.Build(self._sources_digest(), *self._versions(), version, tuple(self._architectures))
        with build_lock(folder / f".{build.name}.lock"):
            if clean:
                shutil.rmtree(folder / build.name, ignore_errors=True)
            if build.library_in(folder) is None:
                with prebuilt.room_in(folder) as room:
                    self._compile(verbose, room)
                    build.place(room / f"{self.NAME}.so", folder)
        return folder / build.name / f"{self.NAME}.so"

    def lies_ready(self) -> bool:
        """Whether a build seems to be there already; no card is looked at, so that this process may still fork."""
        return self.installed() or bool(os.environ.get(prebuilt.VARIABLE)) or self._flags_file().exists()

    def start_compiler(self) -> "subprocess.Popen[bytes]":
        """A process that compiles for the cards of this machine; not a thread, for this process may fork meanwhile."""
        command = [sys.executable, "-m", "ops.builder", "build", "--here"]
        quiet = subprocess.DEVNULL  # what is wrong is found again, and told, by whoever needs the operators
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

    def cache_dir(self) -> Path:
        """Where this version's build lives: a folder per sources, torch, Python and CUDA version."""
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
        return Path(root) / f"{self.NAME}_{self.digest()}"

    def digest(self) -> str:
        """Changes with the sources, torch, Python and the CUDA version: a stale library is never loaded."""
        versions = f"{torch.__version__} {torch.version.cuda} {sys.version_info[:2]} {self._architectures}"
        return hashlib.sha256(f"{versions} {self._sources_digest()}".encode()).hexdigest()[:12]

    def can_run(self) -> bool:
        """Whether `load` will give a module here, as far as it can be known without building one."""
        if not torch.cuda.is_available():
            return False
        return self.installed() or self.shared() is not None or self.is_compatible()

    def shared(self) -> Path | None:
        """The library of a folder that ZEROLORA_OPS names which fits this Python, torch and the cards; None if none."""
        if not os.environ.get(prebuilt.VARIABLE):
            return None
        cards = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        return prebuilt.find(self._sources_digest(), self._versions(), {architecture(card) for card in cards})

    def _sources_digest(self) -> str:
        content = b"".join(path.name.encode() + path.read_bytes() for path in sorted(CSRC.glob("*/*")))
        return hashlib.sha256(content).hexdigest()[:12]

    def _versions(self) -> tuple[str, str, str]:
        """Of torch, of its CUDA, and of Python with the machine it is for."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
        return torch.__version__, str(torch.version.cuda), python

    def _prebuilt(self) -> ModuleType | None:
        if not self.installed():
            return None
        self.origin = "built ahead of time"
        return self._import(BUILT)

    def _shared(self) -> ModuleType | None:
        library = self.shared()
        if library is None:
            return None
        try:
            module = self._import(library.parent)
        except (OSError, ImportError) as error:
            raise BuildError(
                f"{library}: {error}; build it again with --clean, or unset {prebuilt.VARIABLE}"
            ) from error
        self.origin = f"from {library.parent}"
        return module

    def _cached(self) -> ModuleType | None:
        """What an earlier process of this node has built for these cards, without asking ninja whether it is new."""
        try:
            return self._import(self.cache_dir()) if self._flags_file().read_text() == self._flags() else None
        except (OSError, ImportError):  # not built yet, or no longer what it was
            return None

    def _compile_once(self, verbose: bool) -> ModuleType:
        """Compiles behind the node's lock, or finds that another process has done so meanwhile."""
        with build_lock(self.cache_dir() / "node.lock"):
            module = self._cached()
            if module is None:
                self._flags_file().unlink(missing_ok=True)
                module = self._compile(verbose, self.cache_dir())
                self._flags_file().write_text(self._flags())
            return module

    def _flags_file(self) -> Path:
        """Says, once a build is whole, what it was built with."""
        return self.cache_dir() / "flags"

    def _flags(self) -> str:
        return " ".join([*self.cxx_args(), *self.nvcc_args()])

    def _import(self, folder: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.NAME, folder / f"{self.NAME}.so")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def installed(self) -> bool:
        """Whether an ahead-of-time build of exactly these sources and this torch is there."""
        digest = BUILT / "digest"
        return digest.exists() and digest.read_text() == self.digest()

    def _compile(self, verbose: bool, folder: Path) -> ModuleType:
        """Compiles into `folder` and imports the result; the node's lock is held."""
        folder.mkdir(parents=True, exist_ok=True)
        # torch has a lock of its own in this folder, which a killed build leaves behind for ever. Ours is held, so
        # nobody else builds here and a lock found here is stale.
        (folder / "lock").unlink(missing_ok=True)
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

    def _standard(self) -> str:
        newer = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
        return "-std=c++20" if newer else "-std=c++17"

    def _names(self) -> list[str]:
        if self._architectures is not None:
            return self._architectures
        toolkit = toolkit_version()
        cards = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return sorted(check_capability(card, toolkit) for card in cards)


def register() -> LoraOpBuilder:
    """Adds our builder to DeepSpeed's tables, so that its report and its accelerator know the operator."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder = LoraOpBuilder()
    ALL_OPS[builder.NAME] = builder
    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cuda":
        _inside(accelerator, "_lazy_init_class_dict")()
        _inside(accelerator, "class_dict")["LoraOpBuilder"] = LoraOpBuilder
    return builder


def _inside(owner: object, name: str) -> Any:
    """What DeepSpeed promises to nobody; BuildError where it is gone."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise BuildError(
            f"deepspeed {deepspeed.__version__}: {kind} has no `{name}`, on which the operators' builder relies", True
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.builder", description=str(__doc__).split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="DeepSpeed's operators and ours")
    build = commands.add_parser("build", help="compile ahead of time")
    build.add_argument("--arch", nargs="+", metavar="9.0", help="only for cards of these compute capabilities")
    build.add_argument("--here", action="store_true", help="only for the cards of this machine, as a run would")
    build.add_argument("--into", type=Path, metavar="DIR", help=f"a folder to share, which {prebuilt.VARIABLE} names")
    build.add_argument("--clean", action="store_true", help="remove earlier builds first")
    build.add_argument("--verbose", action="store_true", help="show the compiler's output")
    options = parser.parse_args(arguments)
    if options.command != "build":
        from ops.listing import report

        print(report())
        return 0
    if options.arch and options.into is None:
        print("error: --arch: what is built beside the sources is for all cards; add --into DIR", file=sys.stderr)
        return 2
    try:
        builder = LoraOpBuilder(named_architectures(options.arch) if options.arch else None)
        if options.here:
            builder.load(verbose=options.verbose)
            print(builder.origin)
        elif options.into is None:
            print(builder.build(verbose=options.verbose, clean=options.clean))
        else:
            print(builder.build_into(options.into.absolute(), verbose=options.verbose, clean=options.clean))
            print(f"to be found by runs: {prebuilt.VARIABLE}={options.into.absolute()}")
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
