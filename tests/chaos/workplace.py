"""Runs of a tiny model on two ranks in which one thing goes wrong, and what came of each."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from tests.chaos.disks import Disk
from tests.chaos.places import Local, Place
from tests.ends import MISCHIEF, TRAIN
from tests.tiny import write_chats, write_run
from trainer.checkpoint.checkpoint_files import describe_damage, list_checkpoint_folders, list_checkpoints
from trainer.contract.restart_record import read_restarts

STEPS, SAVE_EVERY, EVALUATE_EVERY = 16, 4, 6
BATCH, HELD_OUT_CHATS = 2, 8
# Minutes; the first step may take three times as long.
HANG_MINUTES = 0.5
PATIENCE_S = 1800.0
TO_TELL_S = 60.0
TO_VANISH_S = 20.0


def prepare(folder: Path) -> Path:
    """Make a model, chats and config.yaml for all runs, if they are missing."""
    if (folder / "config.yaml").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "held_out.jsonl", HELD_OUT_CHATS, seed=1)
    training = {
        "batch_size": BATCH,
        "max_steps": STEPS,
        "save_steps": SAVE_EVERY,
        "save_total_limit": 10,
        "eval_steps": EVALUATE_EVERY,
        "hang_timeout": HANG_MINUTES,
    }
    held_out = {"evaluation": {"path": str(folder / "held_out.jsonl")}}
    return write_run(folder, chats=48, lora={"r": 4, "dropout": 0.1}, training=training, dataset=held_out)


@dataclass
class Chaos:
    """One run under way, its lines with the times at which they came."""

    folder: Path
    out: Path
    """The run's own folder."""
    process: subprocess.Popen[str]
    place: Place
    disk: Disk | None = None
    """The one that its folder lies on, if it has one of its own."""
    answers: int | None = None
    """Which of several mischiefs `heard` lets continue."""
    holds: bool = False
    """Whether it is to wait for what comes next."""
    is_killed: bool = False
    """Whether the launcher was killed; salloc then exits with 0, as if SIGKILL was the user's wish."""
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
        return "".join(line for _, line in list(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line))

    def has_called(self, number: int | None = None) -> bool:
        """Whether the mischief, or that with this number, has begun."""
        mark = self._mark_of(number)
        return mark.exists() and bool(mark.read_text())

    def wait_until_called(self) -> float | None:
        """Until the mischief begins; when it did, None if the run ended without it."""
        return float(self.mark.read_text().split()[0]) if self.wait_for(self.has_called) else None

    def heard(self) -> None:
        """Let the rank that called continue."""
        if not self.holds:
            mark = self._mark_of(self.answers)
            mark.with_name(f"{mark.name}.done").touch()

    def _mark_of(self, number: int | None) -> Path:
        return self.mark if number is None else self.mark.with_name(f"{self.mark.name}.{number}")

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
        """Whether it is true before the run has ended and the time is up."""
        deadline = time.monotonic() + seconds
        while not (found := bool(condition())) and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return found or bool(condition())

    def wait_until_reported(self, words: str) -> None:
        """Until the user has seen the words, or for a minute."""
        self.wait_for(lambda: words in self.text, TO_TELL_S)

    @property
    def records(self) -> list[dict[str, float]]:
        """Its metrics as they were when it ended; a resumed run truncates them."""
        return self._records

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of this run with all of the words in their command lines."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            if process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            if any(word.startswith(f"output_dir={self.out}") for word in line) and all(word in line for word in words):
                found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process | None:
        """The process of a rank, if it exists."""
        for process in self.processes("trainer.train"):
            with suppress(psutil.Error):
                variables = process.environ()
                if variables.get("RANK", variables.get("SLURM_PROCID")) == str(number) and "-u" in process.cmdline():
                    return process
        return None

    def launcher(self) -> psutil.Process:
        """The process that the user has started."""
        found = [process for process in self.processes("launcher.cli") if "salloc" not in process.cmdline()]
        return found[0] if found else psutil.Process(self.process.pid)

    def end(self) -> int | None:
        """The exit code; None if it did not end in time, and all of it is killed then."""
        try:
            code: int | None = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
            for process in [*self.processes(), psutil.Process(self.process.pid)]:
                with suppress(psutil.Error):
                    process.kill()
        self._reader.join(5.0)
        metrics = self.out / "metrics.jsonl"
        if metrics.is_file():
            self._records = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        if self.is_killed and code == 0:
            return 137
        return 128 - code if code is not None and code < 0 else code


def start(
    folder: Path,
    out: Path,
    *settings: str,
    mischief: str = "",
    place: Place | None = None,
    disk: Disk | None = None,
    **variables: str,
) -> Chaos:
    """`zerolora train` into `out`, on this machine where no other place is named."""
    place = place or Local()
    env = place.environment() | variables
    mark = folder / f"{out.name}.happened"
    if mischief:  # of a case that was tried before
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(f"{out}-cache", ignore_errors=True)
        for old in folder.glob(f"{mark.name}*"):
            old.unlink()
    if mischief:
        path = os.pathsep.join([str(MISCHIEF), env["PYTHONPATH"]])
        env |= {"ZEROLORA_MISCHIEF": mischief, "ZEROLORA_MISCHIEF_ONCE": str(mark), "PYTHONPATH": path}
    command = place.command([*TRAIN, str(folder / "config.yaml"), f"output_dir={out}", *settings])
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    return Chaos(folder, out, process, place, disk)


def adapter(out: Path) -> bytes | None:
    """The bytes of the trained factors; None if there is no result."""
    file = out / "adapter_model.safetensors"
    if not file.is_file():
        return None
    return b"".join(value.view(torch.uint8).numpy().tobytes() for _, value in sorted(load_file(file).items()))


def damaged(out: Path) -> list[str]:
    """Checkpoints that bear the mark of a whole one and are not, and those without it."""
    whole = {path.name for path in list_checkpoints(out)}
    return [
        path.name
        for path in list_checkpoint_folders(out)
        if path.name not in whole or describe_damage(path) is not None
    ]


def steps_lost(out: Path) -> int:
    """Steps that were made twice, over all restarts."""
    lost = 0
    for restart in read_restarts(out):
        begun = int(restart.checkpoint.rpartition("-")[2] or 0)
        lost += max(0, restart.step - 1 - begun)
    return lost


def left_behind(run: Chaos) -> list[int]:
    """Processes of a run that has ended and had time to vanish; they are ended."""
    deadline = time.monotonic() + TO_VANISH_S
    while (left := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.5)
    for process in left:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return [process.pid for process in left]


def commit() -> str:
    """Of this checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
