"""The builder: registration, architectures, one-line errors, and one build at a time per node."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ops import backend, prebuilt
from ops.builder import LoraOpBuilder, list_operators, main, register
from ops.prebuilt import acquire_build_lock
from ops.toolkit import BuildError, build_gencode_flag, check_toolkit, list_architectures, resolve_architecture

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("foo", "error: foo: not a command of zerolora ops; use list or build; see `zerolora ops --help`\n"),
        ("build foo", "error: foo: not an argument of this command; remove it; see `zerolora ops --help`\n"),
        ("build --arch", "error: --arch: has no value; write one after it; see `zerolora ops build --help`\n"),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err == line


def test_registers_into_deepspeeds_table(capsys):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder = register()
    assert ALL_OPS["zerolora_lora"] is builder
    list_operators()
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if line.startswith("zerolora_lora"))
    assert re.search(r"\[(YES|NO)\].*\[(OKAY|NO)\]", ours)
    assert any(line.startswith("fused_adam") for line in lines)


def test_sources_are_absolute_and_complete():
    builder = LoraOpBuilder()
    assert all(Path(path).is_absolute() and Path(path).exists() for path in builder.sources())
    assert {Path(path).suffix for path in builder.sources()} == {".cu", ".cpp"}


@pytest.mark.parametrize(
    ("toolkit", "expected"),
    [
        ((12, 4), ["70", "75", "80", "86", "89", "90a"]),
        ((12, 8), ["70", "75", "80", "86", "89", "90a", "120"]),
        ((13, 0), ["75", "80", "86", "89", "90a", "120"]),
    ],
)
def test_architectures_follow_the_toolkit(toolkit, expected):
    assert list_architectures(toolkit) == expected


def test_flags_carry_sm_90a_and_no_fast_math():
    flags = LoraOpBuilder(["80", "90a", "compute_120"]).nvcc_args()
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert "-gencode=arch=compute_120,code=compute_120" in flags
    assert "-DZEROLORA_HOPPER" in flags and "-DZEROLORA_HOPPER" not in LoraOpBuilder(["80"]).nvcc_args()
    assert not any("fast_math" in flag for flag in flags)
    assert build_gencode_flag("75") == "-gencode=arch=compute_75,code=sm_75"


def test_ptx_alone_takes_the_path_of_its_own_cards():
    assert "-DZEROLORA_CAPABILITY=89" in LoraOpBuilder(["compute_75", "compute_89"]).cxx_args()
    for names in (["80", "90a", "compute_120"], ["75"], None):
        assert not any("CAPABILITY" in flag for flag in LoraOpBuilder(names).cxx_args())


@pytest.mark.parametrize(
    ("toolkit", "torch_cuda", "message"),
    [
        ((11, 8), "13.0", "nvcc 11.8 does not match torch .* CUDA 13.0: set CUDA_HOME"),
        ((12, 8), "13.0", "nvcc 12.8 does not match torch .* CUDA 13.0: set CUDA_HOME"),
    ],
)
def test_toolkits_that_do_not_fit(toolkit, torch_cuda, message):
    with pytest.raises(BuildError, match=message) as caught:
        check_toolkit(toolkit, torch_cuda)
    assert "\n" not in str(caught.value)


def test_cards_that_are_too_old():
    assert resolve_architecture((9, 0), (13, 0)) == "90a"
    assert resolve_architecture((7, 0), (12, 8)) == "70"
    with pytest.raises(BuildError, match=r"6\.1: 7\.0 \(Volta\) or higher"):
        resolve_architecture((6, 1), (12, 8))
    with pytest.raises(BuildError, match=r"7\.0: nvcc 13\.0 supports 7\.5"):
        resolve_architecture((7, 0), (13, 0))


@pytest.mark.skipif(torch.version.cuda is not None, reason="checks what a torch without CUDA says")
def test_torch_without_cuda_is_one_line_and_auto_takes_the_reference(monkeypatch, capsys):
    assert main(["build"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "built without CUDA" in error and "ops.backend: reference" in error
    monkeypatch.setattr(backend, "_loaded", None)
    monkeypatch.setattr(backend, "_library", None)
    with pytest.raises(ValueError, match=r"ops.backend=cuda: torch .* was built without CUDA"):
        backend.load_backend("cuda")
    chosen = backend.load_backend("auto")
    assert chosen.name == "reference" and "built without CUDA" in chosen.reason
    with pytest.raises(ValueError, match="expected auto, cuda or reference"):
        backend.load_backend("triton")  # type: ignore[arg-type]


def test_missing_nvcc_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    builder = LoraOpBuilder()
    with pytest.raises(BuildError, match="nvcc not found"):
        builder.check()
    assert not builder.is_compatible() and "nvcc not found" in builder.error_log


HOLDER = """
import sys
from pathlib import Path
from ops.prebuilt import acquire_build_lock
with acquire_build_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_builder_waits_and_says_so(tmp_path, capsys):
    path = tmp_path / "node.lock"
    first, inside = holder(path), threading.Event()

    def build() -> None:
        with acquire_build_lock(path):
            inside.set()

    second = threading.Thread(target=build)
    second.start()
    said = ""
    while "\n" not in said:
        time.sleep(0.01)
        said += capsys.readouterr().out
    assert "waiting for another process" in said
    assert not inside.is_set()
    first.communicate("")
    second.join()
    assert inside.is_set()


def test_a_killed_builder_leaves_no_lock(tmp_path):
    path = tmp_path / "node.lock"
    first = holder(path)
    first.kill()
    first.wait()
    with acquire_build_lock(path):  # without waiting for anybody: there is nobody left who would let go
        pass


MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "zerolora_lora", 0, -1, 0};
PyMODINIT_FUNC PyInit_zerolora_lora(void) { return PyModule_Create(&module); }
"""


class SmallBuilder(LoraOpBuilder):
    """Compiles a module of two lines, for real; all else is the builder's own."""

    def _compile(self, verbose: bool, folder: Path) -> ModuleType:
        (folder / "module.c").write_text(MODULE)
        compiler = ["cc", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", str(folder / "module.c")]
        subprocess.run([*compiler, "-o", str(folder / f"{self.NAME}.so")], check=True)
        return self._import(folder / f"{self.NAME}.so")


@pytest.fixture
def shared(tmp_path, monkeypatch) -> Path:
    """A folder with a build for Hopper and Ampere, which the environment names."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("ops.builder.find_toolkit_version", lambda: (13, 0))
    SmallBuilder(["80", "90a"]).build_into(tmp_path / "shared")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("ops.prebuilt.PACKAGE_BUILDS_FOLDER", tmp_path / "package")
    monkeypatch.setenv("ZEROLORA_OPS", f"{tmp_path / 'nothing'}:{tmp_path / 'shared'}")
    return tmp_path / "shared"


def versions() -> tuple[str, str, str]:
    return torch.__version__, "13.0", f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"


def test_a_shared_build_is_found_by_its_key_and_loads(shared):
    sources = SmallBuilder()._compute_sources_digest()
    library = prebuilt.find_build(sources, versions(), {"90a"})
    assert library is not None and library.parent.parent == shared
    assert SmallBuilder()._import(library).__file__ == str(library)
    build = prebuilt.read_record(library.parent)
    assert build is not None and build.architectures == ("80", "90a") and build.toolkit == "13.0"
    assert prebuilt.find_build(sources, versions(), {"80", "90a"}) == library
    assert [path.name for path in shared.iterdir() if not path.name.startswith(".")] == [build.name]
    assert library.stat().st_mode & 0o777 == 0o755 and library.parent.stat().st_mode & 0o777 == 0o755


def test_a_shared_build_for_anything_else_is_left_alone(shared):
    sources = SmallBuilder()._compute_sources_digest()
    torch_version, cuda, python = versions()
    assert prebuilt.find_build(sources, versions(), {"90a", "120"}) is None, "one card of the node is not in it"
    assert prebuilt.find_build("other", versions(), {"90a"}) is None
    assert prebuilt.find_build(sources, ("2.0.0", cuda, python), {"90a"}) is None
    assert prebuilt.find_build(sources, (torch_version, "12.8", python), {"90a"}) is None
    assert prebuilt.find_build(sources, (torch_version, cuda, "3.9-aarch64"), {"90a"}) is None
    record = next(shared.glob("*/build.json"))
    record.write_text(record.read_text()[:40])
    assert prebuilt.find_build(sources, versions(), {"90a"}) is None, "its record is not whole"


def test_a_shared_build_is_made_once(shared):
    first = next(shared.glob("*/zerolora_lora.so"))
    written = first.stat().st_mtime_ns
    assert SmallBuilder(["80", "90a"]).build_into(shared)[0] == first and first.stat().st_mtime_ns == written
    assert SmallBuilder(["80", "90a"]).build_into(shared, clean=True)[0] == first and first.stat().st_mtime_ns > written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--into", "x", "--arch", "sm_90"], "error: --arch sm_90: must be a compute capability, such as 9.0"),
        (["--into", "x", "--arch", "6.1"], "error: compute capability 6.1: 7.0 (Volta) or higher is required"),
    ],
)
def test_what_cannot_be_built_for_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ops.toolkit.find_toolkit_version", lambda: (13, 0))
    assert main(["build", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1 and not (tmp_path / "x").exists()


@pytest.mark.parametrize("folder", ["package", "cache"])
def test_a_build_in_the_package_or_the_cache_is_found_as_a_shared_one_is(shared, folder, monkeypatch):
    SmallBuilder(["80", "90a"]).build_into(shared.parent / folder)
    expected = folder if folder == "package" else "shared"
    found = SmallBuilder(["90a"]).find()
    assert found is not None and found.parents[1].name == expected
    monkeypatch.delenv("ZEROLORA_OPS")
    found = SmallBuilder().find()  # without a CUDA context for any cards
    assert found is not None and found.parents[1].name == folder


def test_a_build_that_cannot_be_loaded_is_one_line(shared):
    library = next(shared.glob("*/zerolora_lora.so"))
    library.write_bytes(b"broken")
    with pytest.raises(BuildError, match=r"zerolora_lora\.so: .*rebuild it with --clean$"):
        SmallBuilder(["80", "90a"]).build_into(shared)


@pytest.mark.skipif(torch.version.cuda is not None, reason="checks what a torch without CUDA says")
def test_kernels_that_are_requested_and_cannot_be_built_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(backend, "_loaded", None)
    assert backend.predict_backend("auto") == "reference"
    with pytest.raises(ValueError, match=r"ops.backend=cuda: torch .* was built without CUDA"):
        backend.check_kernels_available()
    assert list(tmp_path.iterdir()) == []


def test_the_second_process_finds_what_the_first_has_built(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("ops.builder.find_toolkit_version", lambda: (13, 0))
    compiler = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert compiler.stdout is not None and compiler.stdout.readline() == "compiling\n"
    monkeypatch.setattr(SmallBuilder, "_compile", lambda *_: pytest.fail("compiled a second time"))
    library, module = SmallBuilder(["90a"]).build_into(tmp_path)
    assert module.__file__ == str(library) and library.exists()
    assert compiler.wait() == 0


NEIGHBOUR = """
import sys
import time
from pathlib import Path
import torch
import ops.builder
from tests.numerics.test_builder import SmallBuilder

class Slow(SmallBuilder):
    def _compile(self, verbose, folder):
        print("compiling", flush=True)
        time.sleep(1.0)
        return super()._compile(verbose, folder)

torch.version.cuda = "13.0"
ops.builder.find_toolkit_version = lambda: (13, 0)
Slow(["90a"]).build_into(Path(sys.argv[1]))
"""
