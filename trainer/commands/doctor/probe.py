"""Checks of `zerolora doctor` on one machine that need torch: toolchain, GPUs, operators, model, data, memory.

`python -m trainer.commands.doctor.probe [CONFIG] [key=value ...] [--ranks N]` prints one line of JSON after MARK:
`checks` (name, state, found, fix) and `need` (bytes per rank and on disk).
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlparse

import torch

from trainer.config import AUTO, RunConfig, UserError, load_config
from trainer.contract.doctor_check import MARK, Check, State
from trainer.model.published_shapes import is_random

HUB = "https://huggingface.co"
HUB_PATIENCE_S = 5.0
COMPILER_PATIENCE_S = 120.0
KERNEL = "#include <vector>\n__global__ void nothing() {}\nint main() { nothing<<<1, 1>>>(); }\n"


def check_torch() -> Iterator[Check]:
    """Check torch against the driver, and the capability of each GPU."""
    wants_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    built = f"{torch.__version__}, built with CUDA {torch.version.cuda}" if torch.version.cuda else torch.__version__
    if wants_cpu:
        yield Check("torch", "OK", f"{built}; ranks run on the CPU (DS_ACCELERATOR=cpu)")
        return
    if not torch.cuda.is_available():
        has_card = shutil.which("nvidia-smi") is not None
        fix = "install a torch build for a CUDA version no newer than the driver's (`nvidia-smi` shows it)"
        found = f"{built}: sees no GPU" + (" although there is a driver" if has_card else "")
        yield Check("torch", "FAIL" if has_card else "WARN", found, fix if has_card else "")
        return
    yield Check("torch", "OK", f"{built}, {torch.cuda.device_count()} GPUs")
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        bf16, fp8 = capability >= (8, 0), capability >= (8, 9)
        found = f"{capability[0]}.{capability[1]}, bf16 {_yes_no(bf16)}, fp8 {_yes_no(fp8)}"
        old = capability < (7, 0)
        fix = "7.0 (Volta) or newer is needed" if old else "" if bf16 else "fp16 is used instead"
        state: State = "FAIL" if old else "OK" if bf16 else "WARN"
        yield Check(f"GPU {index} capability", state, found, fix)


def check_toolchain(config: RunConfig | None) -> Iterator[Check]:
    """Check nvcc, its host compiler, and whether the fused operators are built or can be."""
    from ops.builder import LoraOpBuilder
    from ops.prebuilt import cache_folder
    from ops.toolkit import BuildError

    backend = "auto" if config is None else config.ops.backend
    builder = LoraOpBuilder()
    needed: State = "FAIL" if backend == "cuda" else "WARN" if torch.cuda.is_available() else "OK"
    if backend in ("peft", "reference"):
        yield Check("operators", "OK", f"not used (ops.backend: {backend})")
        return
    if (library := builder.find()) is not None:
        yield Check("operators", "OK", f"built at {library}")
        return
    if (shared := os.environ.get("ZEROLORA_OPS")) and torch.cuda.is_available():
        found = f"ZEROLORA_OPS={shared}: has no build for this torch, this Python and these GPUs"
        yield Check("operators", "WARN", found, "zerolora ops build --arch ... --into DIR")
    try:
        toolkit = builder.check()
    except BuildError as error:
        without = "" if needed == "FAIL" else "; PEFT's own forward is used instead"
        yield Check("operators", needed, f"{error}{without}", "" if needed == "OK" else "ops.backend: peft")
        return
    yield _try_nvcc(toolkit)
    yield Check("operators", "OK", f"compiled at the first start into {cache_folder()}; now: zerolora ops build")


def _try_nvcc(toolkit: tuple[int, int]) -> Check:
    """Compile an empty kernel, since nvcc refuses host compilers that are too new."""
    from torch.utils import cpp_extension

    nvcc = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "nothing.cu"
        source.write_text(KERNEL)
        command = [str(nvcc), "-std=c++17", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        if "CC" in os.environ:
            command += ["-ccbin", os.environ["CC"]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("nvcc", "FAIL", f"{nvcc}: {error}", "install the CUDA toolkit of torch's CUDA version")
    version = f"nvcc {toolkit[0]}.{toolkit[1]}"
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line] or ["it failed"]
        return Check("nvcc", "FAIL", f"{version}: {lines[0]}", "set CC and CXX to a host compiler it supports")
    return Check("nvcc", "OK", f"{version} and its host compiler build for torch's CUDA {torch.version.cuda}")


def check_model(config: RunConfig) -> Iterator[Check]:
    """Check model and tokenizer: complete in a folder or the hub's cache, or else that the hub is reachable."""
    from trainer.checkpoint.base_fingerprint import cached_folder
    from trainer.model.base import check_weights, load_model_config, load_tokenizer
    from trainer.model.model_kind import check_kind

    model = config.base_model
    if is_random(model):
        yield Check("model", "OK", f"{model}, made at the start")
        return
    folder: Path | None = Path(model)
    if not Path(model).is_dir():
        folder = cached_folder(model, "config.json", config.model.revision or "main")
    absent = [] if folder is None else missing_shards(folder)
    if folder is None or (absent and not Path(model).is_dir()):
        yield _check_hub(model, f"{len(absent)} of its files are not in the cache" if absent else "not in the cache")
        return
    try:
        model_config = load_model_config(model, config.model)
        check_kind(model, model_config)
        if not absent:
            check_weights(model, config.model, model_config)
        load_tokenizer(model, config.model)
    except UserError as error:
        yield Check("model", "FAIL", str(error), "download it (zerolora download) on a machine with a network")
        return
    if absent:
        found = f"{folder}: {len(absent)} of its weight files are missing, {absent[0]} first"
        yield Check("model", "FAIL", found, "download it again (zerolora download), or copy the files")
    else:
        yield Check("model", "OK", f"{folder}, complete")


def missing_shards(folder: Path) -> list[str]:
    """Return the missing weight files listed in a model's index, or its only file if it has no index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]
    return [name for name in names if not (folder / name).exists()]


def _check_hub(model: str, why: str) -> Check:
    """Check whether an incomplete model can be downloaded."""
    fix = f"run `zerolora download {model}` on a machine with a network, then copy the folder"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        return Check("hub", "FAIL", f"HF_HUB_OFFLINE is set, and {model}: {why}", fix)
    address = urlparse(os.environ.get("HF_ENDPOINT", HUB))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=HUB_PATIENCE_S).close()
    except OSError as error:
        return Check("hub", "FAIL", f"{address.netloc} does not answer ({error}), and {model}: {why}", fix)
    return Check("hub", "OK", f"{address.netloc} answers; {model} is downloaded at the start")


def check_data(config: RunConfig) -> Iterator[Check]:
    """Check the local data files of the configuration."""
    section = config.dataset
    sources = [section, *section.mix, *([section.evaluation] if section.evaluation else [])]
    paths = [source.path for source in sources] + ([config.scu.reference] if config.scu.enabled else [])
    for path in filter(None, paths):
        local = Path(path).expanduser()
        if local.suffix and not local.exists() and path.startswith(("/", ".", "~")):
            yield Check("data", "FAIL", f"{path}: no such file", "use an existing file")
        elif local.exists():
            yield Check("data", "OK", f"{path}")


def estimate_need(config: RunConfig, ranks: int) -> tuple[dict[str, int], Check | None]:
    """Return estimated bytes of host memory per rank and on disk, or a finding if there is no estimate.

    On a CPU this is a rank's whole process, otherwise what it needs in addition to the process.
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    from trainer.commands.estimate import build_planner, plan_on_cpu

    try:
        planner, _ = build_planner(config, ranks)
        if not on_gpu:
            choice = plan_on_cpu(planner, config)
            if choice.found is None:
                return {}, Check("estimate", "WARN", f"no memory estimate: {choice.refusal}")
            return {"process_per_rank": choice.found.needed, "disk": choice.found.disk}, None
        if AUTO in (config.zero.stage, config.training.batch_size):
            config = planner.resolve(config, None)
        found = planner.estimate(config)
    except (UserError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return {}, Check("estimate", "WARN", f"no memory estimate for this model: {error}")
    return {"host_per_rank": found.host, "disk": found.disk}, None


def _yes_no(yes: bool) -> str:
    return "yes" if yes else "no"


def main(argv: list[str] | None = None) -> int:
    """Print the findings as one line of JSON."""
    parser = argparse.ArgumentParser(prog="trainer.commands.doctor.probe")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args(argv)
    config = load_config(arguments.config, arguments.overrides).config if arguments.config else None
    findings = [*check_torch(), *check_toolchain(config)]
    need: dict[str, int] = {}
    if config is not None:
        findings += [*check_model(config), *check_data(config)]
        if not any(finding.state == "FAIL" for finding in findings):
            need, without = estimate_need(config, arguments.ranks)
            findings += [without] if without else []
    print(MARK + json.dumps({"checks": [asdict(finding) for finding in findings], "need": need}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
