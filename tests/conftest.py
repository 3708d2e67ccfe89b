"""What holds for every test: no network, one thread, no clock, the CPU where there is no GPU; skips with a reason.

In CI (CI=true) a test that is skipped for a reason outside SKIPS_IN_CI fails: what is missing there is to be installed.
"""

import gc
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

# Set before torch, transformers or deepspeed is imported: they read these once. Child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
# No package can fix these: what the machine lacks, what its user may do, cases that the product refuses.
SKIPS_IN_CI = (
    "no time left for slow tests",
    "needs an NVIDIA GPU",
    r"with an? (NVIDIA driver|GPU)",
    "there is a GPU here",
    "tests/gpu/.* looks at the real card",
    "checks what a torch without CUDA says",
    "needs the right to make memory cgroups",
    ".*, which is refused",
    "transformers reads its images with torchvision, which is not installed",  # none for torch's build without CUDA
)
# Seconds since 1970. CI sets it, so that a slow machine skips the last slow tests instead of exceeding its limit.
SLOW_TESTS_UNTIL = float(os.environ.get("SLOW_TESTS_UNTIL", "inf"))
# Chooses the file that slow tests begin with, so that over several commits none is always too late.
SLOW_TESTS_SEED = int(os.environ.get("SLOW_TESTS_SEED", "0"))
# Examples have no deadline, for a busy machine is no fault; CI tries the same ones every time.
hypothesis.settings.register_profile("zerolora", deadline=None, derandomize=IN_CI)
hypothesis.settings.load_profile("zerolora")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _refuse_skip(report: Report) -> Report:
    """The report, failed where its skip has no place in CI."""
    # pytest reports an expected failure as skipped, too.
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ")
        on_a_gpu = report.nodeid.startswith("tests/gpu/")  # what these need, cards and how many, CI has not
        if not on_a_gpu and not any(re.match(allowed, reason) for allowed in SKIPS_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: skipped, which CI does not allow for this reason: {reason}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark nightly tests as slow too, before `-m` selects: `-m "not slow"` then leaves both out."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
    places = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    if items and SLOW_TESTS_SEED and config.option.markexpr.startswith("slow"):
        items.sort(key=lambda item: (places[item.path] - SLOW_TESTS_SEED) % len(places))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped in CI for no good reason."""
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that is skipped as a whole."""
    return _refuse_skip((yield))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where torch sees no GPU, and slow tests after `SLOW_TESTS_UNTIL`."""
    if time.time() > SLOW_TESTS_UNTIL and item.get_closest_marker("slow"):
        pytest.skip("no time left for slow tests")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_this_file_only() -> None:
    """Looking for garbage, as every run does, takes tenths of a second among all objects of the libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _restore_linear() -> Iterator[None]:
    """Undo what DeepSpeed's `zero.Init` leaves behind: a `torch.nn.functional.linear` that keeps every input."""
    yield
    partition = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    linear = partition and getattr(partition.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if linear:
        sys.modules["torch"].nn.functional.linear = linear


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Commands that a test calls in this process install handlers, which forked workers would inherit."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
