"""Single-machine checks by `zerolora doctor` that need torch: toolchain, GPUs, operators, model, data, memory.

`python -m trainer.commands.doctor.probe [CONFIG] [key=value ...] [--ranks N]` prints JSON after RESULT_PREFIX:
`checks` (name, state, found, fix) and `need` (bytes of host memory per rank, and of disk space).
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from trainer.config import AUTO, RunConfig, UserError, load_config
from trainer.config.errors import format_count
from trainer.contract.json_records import RESULT_PREFIX, CheckResult, CheckState


def check_torch() -> Iterator[CheckResult]:
    built = f"{torch.__version__}, built with CUDA {torch.version.cuda}" if torch.version.cuda else torch.__version__
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        yield CheckResult("torch", "OK", f"{built}; ranks run on the CPU (DS_ACCELERATOR=cpu)")
        return
    if not torch.cuda.is_available():
        has_gpu_driver = shutil.which("nvidia-smi") is not None
        fix = "install a torch build for a CUDA version no newer than the driver's (`nvidia-smi` shows it)"
        found = f"{built}: no GPU found" + (", although a driver is installed" if has_gpu_driver else "")
        yield CheckResult("torch", "FAIL" if has_gpu_driver else "WARN", found, fix if has_gpu_driver else "")
        return
    yield CheckResult("torch", "OK", f"{built}, {format_count(torch.cuda.device_count(), 'GPU')}")


def check_toolchain(config: RunConfig | None) -> Iterator[CheckResult]:
    """Check nvcc, and whether the fused operators are built or can be built."""
    from ops.builder import LoraOpBuilder
    from ops.prebuilt import get_cache_folder
    from ops.toolkit import BuildError

    backend = "auto" if config is None else config.ops.backend
    builder = LoraOpBuilder()
    needed: CheckState = "FAIL" if backend == "cuda" else "WARN" if torch.cuda.is_available() else "OK"
    if backend in ("peft", "reference"):
        yield CheckResult("operators", "OK", f"not used (ops.backend: {backend})")
        return
    if (library := builder.find()) is not None:
        yield CheckResult("operators", "OK", f"built at {library}")
        return
    if (shared := os.environ.get("ZEROLORA_OPS")) and torch.cuda.is_available():
        found = f"ZEROLORA_OPS={shared}: has no build for this torch version, Python version and GPU type"
        yield CheckResult("operators", "WARN", found, "zerolora ops build --arch ... --into DIR")
    try:
        builder.check()
    except BuildError as error:
        fallback = "" if needed == "FAIL" else "; PEFT's forward pass is used instead"
        if needed == "OK":
            yield CheckResult("operators", "OK", f"not used without a GPU{fallback}")
        else:
            yield CheckResult("operators", needed, f"{error}{fallback}", "ops.backend: peft")
        return
    found = f"will be compiled into {get_cache_folder()} on first use; to compile now: zerolora ops build"
    yield CheckResult("operators", "OK", found)


def check_inputs(config: RunConfig) -> Iterator[CheckResult]:
    """Check settings, model, tokenizer and data files as training does, and whether the weights are on this machine."""
    from trainer.checkpoint.output_folder import check_inputs_and_output
    from trainer.setup.kinds import find_model_kind
    from trainer.setup.preflight import check_settings

    model = config.base_model
    try:
        check_inputs_and_output(config, for_training=False)
        check_settings(config)
        kind = find_model_kind(config)
        kind.read_files(config)
        has_weights = kind.has_weights(config)
    except UserError as error:
        fix = "see the message; if offline, run `hf download` on another machine"
        yield CheckResult("run", "FAIL", str(error), fix)
        return
    yield CheckResult("run", "OK", f"settings, {model} and data are usable")
    if not has_weights:
        is_offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")
        found = "not on this machine, and HF_HUB_OFFLINE is set" if is_offline else "will be downloaded at startup"
        yield CheckResult("weights", "FAIL" if is_offline else "WARN", f"{model}: {found}", f"hf download {model}")


def estimate_host_resources(config: RunConfig, ranks: int) -> tuple[dict[str, int], CheckResult | None]:
    """Return the estimated bytes of host memory per rank and of disk space, or a warning if they cannot be estimated.

    The host memory excludes the process itself; on the CPU it includes everything that would be on the GPU.
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    from trainer.commands.estimate import build_planner

    try:
        planner, _ = build_planner(config, ranks)
        if AUTO in (config.zero.stage, config.training.batch_size):
            config = planner.resolve(config, None)
        estimate = planner.estimate(config)
    except (UserError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return {}, CheckResult("estimate", "WARN", f"memory and disk space cannot be estimated: {error}")
    return {"host_per_rank": estimate.host if on_gpu else estimate.peak, "disk": estimate.disk}, None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer.commands.doctor.probe")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args(argv)
    config = load_config(arguments.config, arguments.overrides).config if arguments.config else None
    findings = [*check_torch(), *check_toolchain(config)]
    need: dict[str, int] = {}
    if config is not None:
        findings += check_inputs(config)
        if not any(finding.state == "FAIL" for finding in findings):
            need, warning = estimate_host_resources(config, arguments.ranks)
            findings += [warning] if warning else []
    print(RESULT_PREFIX + json.dumps({"checks": [asdict(finding) for finding in findings], "need": need}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
