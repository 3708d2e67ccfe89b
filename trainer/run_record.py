"""What a run was: its resolved configuration, versions, commit and command."""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.config import RunConfig

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "liger-kernel")
OF_EARLIER_RUN = (
    "checkpoint-*",
    ".writing-*",
    "initial_adapter",
    "merged",
    "adapter_*",
    "model*.safetensors*",
    "metrics.jsonl",
    "tensorboard",
    "plots",
    "profile",
    "report.html",
    "scu_*.json",
    "wandb",
    "wandb-id.txt",
)


def write_run_record(run_dir: Path, config: RunConfig, world_size: int, device: str) -> None:
    """Write training_config.json (what `zerolora train` can be given again) and run.json (what it ran on)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    resolved = config.model_dump_json(indent=1)
    (run_dir / "training_config.json").write_text(resolved)
    record = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "world_size": world_size,
        "device": device,
        "device_name": _device_name(device),
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": commit(),
        "config_sha256": hashlib.sha256(resolved.encode()).hexdigest(),
    }
    (run_dir / "run.json").write_text(json.dumps(record, indent=1))


def remove_earlier_run(run_dir: Path) -> None:
    """Remove what an earlier run left; files that no run writes stay."""
    for pattern in OF_EARLIER_RUN:
        for path in run_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide a run's numbers."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout, marked when files differ from it."""
    folder = Path(__file__).parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # installed without a checkout
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")
