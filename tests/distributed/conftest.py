"""Launches the matrix of training runs once per session and hands out what each case measured."""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from launcher.targets.local import build_local_command
from tests.distributed.plan import ONE_RANK, TWO_RANKS
from tests.preferences import write_answers, write_pairs
from tests.tiny import make_model, write_chats
from trainer.contract.default_ranks import CPU_RANKS, list_visible_gpus
from trainer.contract.rendezvous import find_free_port

ROOT = Path(__file__).parent.parent.parent
GRACE_S = 20.0


@dataclass(frozen=True)
class Case:
    """A finished run."""

    folder: Path
    console: str

    def records(self, name: str) -> list[float]:
        """The values of one metric, in order of steps."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line[name] for line in lines if name in line]

    @property
    def losses(self) -> list[float]:
        return self.records("train/loss")

    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter_model.safetensors")


class Matrix:
    """The cases of all launches into one folder."""

    def __init__(self, folder: Path, cases: list[dict[str, Any]]) -> None:
        self._folder = folder
        self._cases = cases

    def __getitem__(self, name: str) -> Case:
        plan = {case["name"]: case for case in self._cases}
        if not (self._folder / f"{name}-done-0").exists():
            logs = [*self._folder.glob(f"{name}-*ed-0.txt")] or [*self._folder.glob("launch-*.log")]
            lines = "\n".join(file.read_text()[-3000:] for file in logs)
            pytest.fail(f"case {name} did not come to its end:\n{lines}")
        folder = Path(plan[name]["overrides"].get("output_dir", name))
        return Case(self._folder / folder, (self._folder / f"{name}-console-0.txt").read_text())


def run_ranks(count: int, module: str, *arguments: str, env: dict[str, str], log: Path, timeout_s: float) -> int:
    """Run `module` on so many ranks of this machine, CPU ranks or GPUs, and return the first exit code that is not 0.

    They are started as `zerolora train` starts them; tests/cluster does it by DeepSpeed's launcher as well. What is
    left of them is killed `GRACE_S` after one failed. Raises subprocess.TimeoutExpired.
    """
    # CPU ranks beyond the cores are refused; counted as GPUs they are not.
    on_cpu = list(range(count)) if count > CPU_RANKS else []
    gpus = on_cpu if env.get("DS_ACCELERATOR") == "cpu" else list_visible_gpus()
    command = build_local_command(arguments, gpus=gpus, num_gpus=count, port=find_free_port(), module=module)
    shared = {**env, **command.set_variables}
    deadline, failed_at = time.monotonic() + timeout_s, None
    with log.open("w") as file:
        ranks = [
            subprocess.Popen(command.argv, cwd=ROOT, env={**shared, **variables}, stdout=file, stderr=file)
            for variables in command.rank_environments
        ]
        try:
            while any(rank.poll() is None for rank in ranks):
                now = time.monotonic()
                if now > deadline:
                    raise subprocess.TimeoutExpired(command.argv, timeout_s)
                if failed_at is None and any(rank.poll() for rank in ranks):
                    failed_at = now
                if failed_at is not None and now > failed_at + GRACE_S:
                    break
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def environment() -> dict[str, str]:
    """What a user's shell would hold, for CPU ranks without a network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    changes = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return {**os.environ, **changes}


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Every case of plan.py, trained for real: two gloo ranks first, then one that resumes from there."""
    folder = tmp_path_factory.mktemp("matrix")
    for ranks, plan in ((2, TWO_RANKS), (1, ONE_RANK)):
        launch(folder, ranks, plan, environment())
    return Matrix(folder, [*TWO_RANKS, *ONE_RANK])


def launch(
    folder: Path, ranks: int, plan: list[dict[str, Any]], env: dict[str, str], *, timeout_s: float = 1200
) -> None:
    """Train the plan's cases on so many ranks; a failure is reported by the requested case."""
    if not (folder / "base.yaml").exists():
        make_model(folder / "model")
        make_model(folder / "biased", attention_bias=True, tie_word_embeddings=True)
        write_chats(folder / "train.jsonl", 40)
        write_chats(folder / "held_out.jsonl", 6, seed=1)
        write_pairs(folder / "pairs.jsonl", 24)
        write_answers(folder / "answers.jsonl", 24, good=2)
        (folder / "base.yaml").write_text(yaml.safe_dump(_base(folder)))
    path = folder / f"plan-{ranks}.json"
    path.write_text(json.dumps(_resolve(plan, folder)))
    arguments = (str(folder), str(path))
    log = folder / f"launch-{ranks}.log"
    run_ranks(ranks, "tests.distributed.matrix", *arguments, env=env, log=log, timeout_s=timeout_s)


def _base(folder: Path) -> dict[str, Any]:
    return {
        "base_model": str(folder / "model"),
        "output_dir": "unset",
        "lora": {"r": 4, "alpha": 8},
        "dataset": {
            "path": str(folder / "train.jsonl"),
            "evaluation": {"path": str(folder / "held_out.jsonl")},
            "max_length": 96,
            "cache_dir": str(folder / "cache"),
        },
        "training": {
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "precision": "fp32",
            "save_steps": 0,
        },
        "logging": {"report_to": "none"},
    }


def _resolve(plan: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Paths in the plan are relative to the session's folder."""
    resolved = []
    for case in plan:
        overrides = dict(case["overrides"])
        for key in (
            "output_dir",
            "base_model",
            "lora.adapter_path",
            "dataset.cache_dir",
            "dataset.path",
            "dataset.evaluation.path",
            "scu.reference",
        ):
            if key in overrides:
                overrides[key] = str(folder / overrides[key])
        for adapter in overrides.get("adapters", ()):  # of a plan that is read once
            if "dataset.path" in adapter:
                adapter["dataset.path"] = str(folder / Path(adapter["dataset.path"]).name)
        if "/" in str(overrides.get("training.resume_from_checkpoint", "")):
            overrides["training.resume_from_checkpoint"] = str(folder / overrides["training.resume_from_checkpoint"])
        resolved.append({**case, "overrides": overrides})
    return resolved
