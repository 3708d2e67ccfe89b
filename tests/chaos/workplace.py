"""Runs of a tiny model on two CPU ranks in which one thing goes wrong, and what came of each."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from safetensors.torch import load_file

from tests.distributed.conftest import environment
from tests.ends import MISCHIEF, TRAIN
from tests.tiny import make_model, write_chats
from trainer.checkpoint.checkpoint_files import checkpoint_folders, damage, whole_checkpoints
from trainer.contract.restart_record import read_restarts

STEPS, SAVE_EVERY, EVALUATE_EVERY = 16, 4, 6
# Minutes; the first step may take three times as long.
HANG_MINUTES = 0.5
PATIENCE_S = 600.0


def prepare(folder: Path) -> Path:
    """A model, chats and config.yaml; what all runs have in common."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 48)
    write_chats(folder / "held_out.jsonl", 8, seed=1)
    settings = {
        "base_model": str(folder / "model"),
        "output_dir": "unset",
        "lora": {"r": 4, "dropout": 0.1},
        "dataset": {
            "path": str(folder / "train.jsonl"),
            "max_length": 96,
            "cache_dir": str(folder / "cache"),
            "evaluation": {"path": str(folder / "held_out.jsonl")},
        },
        "training": {
            "batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "save_steps": SAVE_EVERY,
            "save_total_limit": 10,
            "eval_steps": EVALUATE_EVERY,
            "hang_timeout": HANG_MINUTES,
        },
        "logging": {"report_to": "none", "progress": "off"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@dataclass
class Chaos:
    """One run under way, its lines with the times at which they came."""

    folder: Path
    out: Path
    """The run's own folder."""
    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._records: list[dict[str, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def mark(self) -> Path:
        """The file that the mischief makes when it begins."""
        return self.folder / f"{self.out.name}.happened"

    @property
    def text(self) -> str:
        """All that the user saw."""
        return "".join(line for _, line in self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line))

    def wait_until_called(self) -> float:
        """Until the mischief begins; when it did."""
        self.wait_for(lambda: self.mark.exists() and bool(self.mark.read_text()))
        return float(self.mark.read_text().split()[0])

    def heard(self) -> None:
        """Let the rank that called go on."""
        self.mark.with_name(f"{self.mark.name}.done").touch()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it is true, or the run has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def records(self) -> list[dict[str, float]]:
        """Its metrics as they were when it ended, which a run that goes on cuts back."""
        return self._records

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, as its heartbeat tells."""
        beat = json.loads((self.out / "logs" / f"heartbeat-{number}.json").read_text().splitlines()[0])
        return psutil.Process(int(beat["pid"]))

    def end(self) -> int | None:
        """The exit code; None if it did not end in time, and all of it is killed then."""
        try:
            code: int | None = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
        self._reader.join(5.0)
        metrics = self.out / "metrics.jsonl"
        if metrics.is_file():
            self._records = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        return code


def start(folder: Path, out: Path, *settings: str, mischief: str = "", **variables: str) -> Chaos:
    """`zerolora train` into `out`."""
    env = environment() | variables
    mark = folder / f"{out.name}.happened"
    if mischief:
        path = os.pathsep.join([str(MISCHIEF), env["PYTHONPATH"]])
        env |= {"ZEROLORA_MISCHIEF": mischief, "ZEROLORA_MISCHIEF_ONCE": str(mark), "PYTHONPATH": path}
    process = subprocess.Popen(
        [*TRAIN, str(folder / "config.yaml"), f"output_dir={out}", *settings],
        env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    return Chaos(folder, out, process)


def adapter(out: Path) -> bytes | None:
    """The bytes of the trained factors; None if there is no result."""
    file = out / "adapter_model.safetensors"
    if not file.is_file():
        return None
    return b"".join(value.numpy().tobytes() for _, value in sorted(load_file(file).items()))


def damaged(out: Path) -> list[str]:
    """Checkpoints that bear the mark of a whole one and are not, and those without it."""
    whole = {path.name for path in whole_checkpoints(out)}
    return [path.name for path in checkpoint_folders(out) if path.name not in whole or damage(path) is not None]


def steps_lost(out: Path) -> int:
    """Steps that were made twice, over all restarts."""
    lost = 0
    for restart in read_restarts(out):
        begun = int(restart.checkpoint.rpartition("-")[2] or 0)
        lost += max(0, restart.step - 1 - begun)
    return lost


def left_behind(out: Path) -> list[int]:
    """Processes of a run that has ended."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if f"output_dir={out}" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found
