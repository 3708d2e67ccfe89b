"""Build the CUDA operators through DeepSpeed's op builder, and list them with DeepSpeed's own.

    python -m ops.builder list                        DeepSpeed's operators and ours: compatible, installed
    python -m ops.builder build [--clean] [--verbose] compile now, so that no rank has to
    python -m ops.builder build --arch 9.0 --into DIR compile into a folder shared by all users of one or more nodes
    ZEROLORA_BUILD_OPS=1 pip install -e .             compile during installation

DeepSpeed has no hook for third-party operators (its `all_ops.py` scans its own folder): `register` adds ours to its
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
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.ops.op_builder import builder as deepspeed_builder
from torch.utils import cpp_extension

from ops import prebuilt
from ops.toolkit import (
    BuildError,
    all_architectures,
    architecture,
    build_ptx_flags,
    check_capability,
    check_toolkit,
    gencode,
    parse_architectures,
    toolkit_version,
)

CSRC = Path(__file__).resolve().parent / "csrc"
BUILT = CSRC.parent / "built"
MAMBA = ("mamba-ssm", "causal-conv1d")  # third-party packages of the extra `mamba`


class LoraOpBuilder(deepspeed_builder.CUDAOpBuilder):
    """DeepSpeed builder for `zerolora_lora`: compiles the kernels of ops/csrc for the cards of this node."""

    BUILD_VAR = "ZEROLORA_BUILD_OPS"
    NAME = "zerolora_lora"

    def __init__(self, architectures: Sequence[str] | None = None) -> None:
        super().__init__(name=self.NAME)
        self._architectures = list(architectures) if architectures is not None else None
        self.origin = "built for this card"
        """How the loaded module was obtained, for messages."""

    def absolute_name(self) -> str:
        return f"ops.built.{self.NAME}"

    def sources(self) -> list[str]:
        return sorted(str(path) for pattern in ("*.cpp", "*.cu") for path in CSRC.rglob(pattern))

    def include_paths(self) -> list[str]:
        return sorted(str(path) for path in CSRC.iterdir())  # headers are included by bare name

    def cxx_args(self) -> list[str]:
        return ["-O3", self._standard(), *build_ptx_flags(self._architectures or ())]

    def nvcc_args(self) -> list[str]:
        # Replaces DeepSpeed's flags, which add --use_fast_math and never emit sm_90a.
        names = self._names()
        hopper = ["-DZEROLORA_HOPPER"] if "90a" in names else []
        threads = f"--threads={min(os.cpu_count() or 1, 8)}"
        return ["-O3", self._standard(), threads, *hopper, *(gencode(name) for name in names)]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether nvcc, torch and (once a CUDA context exists) the card can build and run it."""
        try:
            self.check()
        except BuildError as error:
            self.error_log = str(error)
            if verbose:
                self.warning(f"{self.NAME}: {error}")
            return False
        return True

    def check(self) -> tuple[int, int]:
        """Return the version of the toolkit; raises BuildError if the operators cannot be built or run."""
        if torch.version.cuda is None:
            raise BuildError(
                f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or set"
                " ops.backend: reference"
            )
        toolkit = toolkit_version()
        check_toolkit(toolkit, torch.version.cuda)
        # Creating a CUDA context here would break forked workers, so check the card only if one exists.
        if torch.cuda.is_initialized():
            check_capability(torch.cuda.get_device_capability(), toolkit)
        return toolkit

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the module: prebuilt, shared, cached by an earlier process, or compiled now under the build lock.

        Raises BuildError if it cannot be built or the compiler fails.
        """
        known: dict[str, ModuleType] = get_private(deepspeed_builder.OpBuilder, "_loaded_ops")
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
        """Compile ahead of time for every architecture the toolkit knows (no GPU needed), and return the library.

        Raises BuildError if it cannot be built or the compiler fails.
        """
        toolkit = self.check()
        if clean:
            shutil.rmtree(BUILT, ignore_errors=True)
            shutil.rmtree(self.cache_dir(), ignore_errors=True)
        digest = self.digest()
        self._architectures = self._architectures or all_architectures(toolkit)
        with prebuilt.build_lock(BUILT / "node.lock"):
            (BUILT / "digest").unlink(missing_ok=True)
            self._compile(verbose, BUILT)
            (BUILT / "digest").write_text(digest)
        return BUILT / f"{self.NAME}.so"

    def build_into(self, folder: Path, verbose: bool = False, clean: bool = False) -> Path:
        """Compile into a shared folder unless it has this build, and return the library.

        The build is renamed into place, so that it is never seen incomplete. Raises BuildError if it cannot be built or
        the compiler fails.
        """
        toolkit = self.check()
        self._architectures = self._architectures or all_architectures(toolkit)
        version = f"{toolkit[0]}.{toolkit[1]}"
        build = prebuilt.Build(self._sources_digest(), *self._versions(), version, tuple(self._architectures))
        with prebuilt.build_lock(folder / f".{build.name}.lock"):
            if clean:
                shutil.rmtree(folder / build.name, ignore_errors=True)
            if build.library_in(folder) is None:
                with prebuilt.temporary_folder(folder) as room:
                    self._compile(verbose, room)
                    build.place(room / f"{self.NAME}.so", folder)
        return folder / build.name / f"{self.NAME}.so"

    def has_build(self) -> bool:
        """Return whether a build seems to exist, without initializing CUDA, so that this process may still fork."""
        return self.installed() or bool(os.environ.get(prebuilt.VARIABLE)) or self._flags_file().exists()

    def start_compiler(self) -> "subprocess.Popen[bytes]":
        """Start a process that compiles for the cards of this machine; a thread would make a later fork unsafe."""
        command = [sys.executable, "-m", "ops.builder", "build", "--here"]
        quiet = subprocess.DEVNULL  # `load` reports the errors
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

    def cache_dir(self) -> Path:
        """Return the folder of this build: one per version of the sources, torch, Python and CUDA."""
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
        return Path(root) / f"{self.NAME}_{self.digest()}"

    def digest(self) -> str:
        """Hash the sources and the versions of torch, Python and CUDA, so that a stale library is never loaded."""
        versions = f"{torch.__version__} {torch.version.cuda} {sys.version_info[:2]} {self._architectures}"
        return hashlib.sha256(f"{versions} {self._sources_digest()}".encode()).hexdigest()[:12]

    def can_run(self) -> bool:
        """Return whether `load` should succeed here, as far as can be known without building."""
        if not torch.cuda.is_available():
            return False
        return self.installed() or self.shared() is not None or self.is_compatible()

    def shared(self) -> Path | None:
        """Return the library in a folder of ZEROLORA_OPS that fits this Python, torch and the cards, or None."""
        if not os.environ.get(prebuilt.VARIABLE):
            return None
        cards = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        return prebuilt.find(self._sources_digest(), self._versions(), {architecture(card) for card in cards})

    def _sources_digest(self) -> str:
        content = b"".join(path.name.encode() + path.read_bytes() for path in sorted(CSRC.glob("*/*")))
        return hashlib.sha256(content).hexdigest()[:12]

    def _versions(self) -> tuple[str, str, str]:
        """Versions of torch and its CUDA, and of Python with the machine type."""
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
        """Load what an earlier process built on this node, without asking ninja whether it is current."""
        try:
            return self._import(self.cache_dir()) if self._flags_file().read_text() == self._flags() else None
        except (OSError, ImportError):  # not built yet, or unusable
            return None

    def _compile_once(self, verbose: bool) -> ModuleType:
        """Compile under the node's lock, or load what another process compiled in the meantime."""
        with prebuilt.build_lock(self.cache_dir() / "node.lock"):
            module = self._cached()
            if module is None:
                self._flags_file().unlink(missing_ok=True)
                module = self._compile(verbose, self.cache_dir())
                self._flags_file().write_text(self._flags())
            return module

    def _flags_file(self) -> Path:
        """File with the compiler flags of the build; written last, so it marks a complete build."""
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
        """Return whether an ahead-of-time build of exactly these sources and this torch exists."""
        digest = BUILT / "digest"
        return digest.exists() and digest.read_text() == self.digest()

    def _compile(self, verbose: bool, folder: Path) -> ModuleType:
        """Compile into `folder` and import the result. The caller holds the node's lock."""
        folder.mkdir(parents=True, exist_ok=True)
        # A killed build leaves torch's own lock file in this folder forever. We hold our lock, so it is stale.
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
    """Add our builder to DeepSpeed's tables, so that its report and its accelerator know the operator."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder = LoraOpBuilder()
    ALL_OPS[builder.NAME] = builder
    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cuda":
        get_private(accelerator, "_lazy_init_class_dict")()
        get_private(accelerator, "class_dict")["LoraOpBuilder"] = LoraOpBuilder
    return builder


def get_private(owner: object, name: str) -> Any:
    """Return a private attribute of DeepSpeed; raises BuildError if it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise BuildError(
            f"deepspeed {deepspeed.__version__}: {kind} has no `{name}`, which the operators' builder needs", True
        ) from None


def list_operators() -> str:
    """Return every operator in aligned columns: name, installed, compatible."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    ours = register()
    rows = [("operator", "installed", "compatible")]
    for name, builder in sorted(ALL_OPS.items()):
        installed = ours.installed() if name == ours.NAME else bool(installed_ops.get(name, False))
        compatible = deepspeed_builder.probe_is_compatible(builder, verbose=False)
        rows.append((name, "yes" if installed else "no", "yes" if compatible else "no"))
    lines = [f"{name:<28}{installed:<12}{compatible}" for name, installed, compatible in rows]
    for name in MAMBA:
        found = importlib.util.find_spec(name.replace("-", "_")) is not None
        lines.append(f"{name:<28}{'yes' if found else 'no':<12}third-party, for Mamba layers")
    if not ours.is_compatible():
        lines.append(f"{ours.NAME}: {ours.error_log}")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `zerolora ops --help` lists the commands\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="zerolora ops", description=str(__doc__).split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="DeepSpeed's operators and ours")
    build = commands.add_parser("build", help="compile ahead of time")
    build.add_argument("--arch", nargs="+", metavar="9.0", help="only for cards of these compute capabilities")
    build.add_argument("--here", action="store_true", help="only for the cards of this machine, as a run would")
    build.add_argument("--into", type=Path, metavar="DIR", help=f"shared folder, to be named in {prebuilt.VARIABLE}")
    build.add_argument("--clean", action="store_true", help="remove earlier builds first")
    build.add_argument("--verbose", action="store_true", help="show the compiler's output")
    options = parser.parse_args(arguments)
    if options.command != "build":
        print(list_operators())
        return 0
    if options.arch and options.into is None:
        print("error: --arch: builds inside the package are for all cards; add --into DIR", file=sys.stderr)
        return 2
    try:
        builder = LoraOpBuilder(parse_architectures(options.arch) if options.arch else None)
        if options.here:
            builder.load(verbose=options.verbose)
            print(builder.origin)
        elif options.into is None:
            print(builder.build(verbose=options.verbose, clean=options.clean))
        else:
            print(builder.build_into(options.into.absolute(), verbose=options.verbose, clean=options.clean))
            print(f"to use it in runs, set {prebuilt.VARIABLE}={options.into.absolute()}")
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
