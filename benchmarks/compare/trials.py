"""Trials of a comparison: their list, those already done, and the processes that train the others."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks.compare.measured_run import DOCUMENTS_FILE
from trainer.config import RunConfig, UserError, load_config
from trainer.config.needs import find_unused_settings
from trainer.contract.launcher_process import export_launcher_identity

CONTROLLERS = ("none", "fixed", "linear", "cosine", "pi")
MEASURES = ("delta", "factors", "kl")
CHILD = "benchmarks.compare.trial"
POLL_S = 0.2
PATIENCE_S = 20.0
# A trial only measures: no checkpoints, no early stopping, no output or report.
OF_EVERY_TRIAL = (
    "scu.enabled=true",
    "output.overwrite=delete",
    "training.save_steps=0",
    "training.best_checkpoint=false",
    "training.early_stopping=null",
    "training.resume_from_checkpoint=null",
    "logging.sample_prompts=[]",
)
# Settings that change no number of a trial (or of one without a controller) do not make it another trial.
OF_NO_EFFECT = {"output_dir", "logging", "output"}
OF_PI_ALONE = {
    f"scu.{name}" for name in "target law kp ki deadband leak integral_bound lambda_min scale_to_target".split()
}
NO_REPORT = "logging.report_to=none"
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Setting:
    """The parameters of a trial except its seed. `lambda_` is lambda, or the final value of a schedule."""

    measure: str
    controller: str
    lambda_: float | None = None
    target: float | None = None
    several: bool = False
    """PI also runs at other targets, so the label must include the target."""

    @property
    def label(self) -> str:
        """Return the label in tables and folders, `delta-fixed-0.1`; the measure is left out without a regulariser."""
        if self.controller == "none":
            return "none"
        number = self.target if self.controller == "pi" and self.several else self.lambda_
        return f"{self.measure}-{self.controller}" + ("" if number is None else f"-{number:g}")


@dataclass(frozen=True)
class Trial:
    """One run: its setting and seed, its folder, its overrides of the configuration, and the resolved configuration."""

    setting: Setting
    seed: int
    folder: Path
    overrides: tuple[str, ...]
    config: RunConfig

    def is_finished(self) -> bool:
        """Return whether the folder holds this finished run. Raises UserError if it was made with other settings."""
        if not (self.folder / DOCUMENTS_FILE).is_file():
            return False
        text = (self.folder / "training_config.json").read_text(encoding="utf-8")
        earlier = RunConfig.model_validate_json(text).model_dump(mode="json")
        without_effect = OF_NO_EFFECT | (set() if self.setting.controller == "pi" else OF_PI_ALONE)
        differing = _first_difference(earlier, self.config.model_dump(mode="json"), without_effect)
        if differing:
            raise UserError(
                f"{self.folder}: finished with other settings, {differing}; use another --output, or delete it"
            )
        return True


def plan(path: Path, overrides: Sequence[str], config: RunConfig, options: argparse.Namespace) -> list[Trial]:
    """Return every trial for the options, with its configuration checked, seed by seed.

    Raises UserError for settings that no trial could run with.
    """
    shown = () if any(text.startswith("logging.report_to=") for text in overrides) else (NO_REPORT,)
    trials = []
    for seed in range(config.seed, config.seed + options.seeds):
        for setting in settings(config, options):
            folder = options.output / f"{setting.label}-seed{seed}"
            steered = {"enabled": True, "measure": setting.measure, "controller": setting.controller}
            scu = config.scu.model_copy(update=steered)
            unread = {each.name for each in find_unused_settings(config.model_copy(update={"scu": scu}))}
            given = [text for text in overrides if text.partition("=")[0] not in unread]
            own = [*given, *OF_EVERY_TRIAL, *shown, *_overrides(setting, config, min(options.lambdas))]
            own += [f"seed={seed}", f"output_dir={folder}"]
            trials.append(Trial(setting, seed, folder, tuple(own), load_config(path, own).config))
    return trials


def settings(config: RunConfig, options: argparse.Namespace) -> list[Setting]:
    """Return (measure, controller, lambda) in the order of the table; `none` occurs once."""
    found: list[Setting] = []
    one_measure = len(options.measures) == 1
    for index, measure in enumerate(options.measures):
        given = options.targets or [config.scu.target] * len(options.measures)
        targets = [None if target == "auto" else float(target) for target in (given if one_measure else given[index:])]
        lambdas = {
            "none": [] if index else [None],
            "fixed": options.lambdas,
            "linear": options.ramps,
            "cosine": options.ramps,
        }
        for controller in (name for name in CONTROLLERS if name in options.controllers):
            if controller == "pi":
                held = targets if one_measure else targets[:1]
                found += [Setting(measure, controller, None, target, len(held) > 1) for target in held]
            else:
                found += [Setting(measure, controller, lambda_, targets[0]) for lambda_ in lambdas[controller]]
    return found


def _overrides(setting: Setting, config: RunConfig, smallest: float) -> list[str]:
    """Return the overrides of one setting; a fixed lambda widens the bounds, a schedule ends at its own value."""
    own = [f"scu.measure={setting.measure}", f"scu.controller={setting.controller}"]
    if setting.target is not None:
        own.append(f"scu.target={setting.target:g}")
    if setting.lambda_ is None:
        return own
    start, end = setting.lambda_, max(config.scu.lambda_max, setting.lambda_)
    if setting.controller != "fixed":
        start, end = min(smallest, setting.lambda_ / 2), setting.lambda_
    low = min(config.scu.lambda_min, start)
    # Keep all digits: a lambda rounded past its bound would be an error.
    return [*own, *(f"scu.lambda_{name}={value!r}" for name, value in (("start", start), ("min", low), ("max", end)))]


def run_trials(
    trials: Sequence[Trial],
    config: Path,
    slots: Sequence[str | None],
    console: Console,
    forgetting: Path | None = None,
) -> list[Trial]:
    """Train them, as many at a time as there are slots (a CUDA_VISIBLE_DEVICES each); return those that failed.

    `forgetting`: text on which they also measure the distance from the base.
    """
    waiting, failed = list(trials), []
    free = list(slots)
    export_launcher_identity()
    running: dict[Process, tuple[Trial, str | None, float]] = {}
    threads = max(1, (os.cpu_count() or 1) // len(slots))
    started = time.monotonic()
    try:
        while waiting or running:
            while waiting and free:
                trial, slot = waiting.pop(0), free.pop(0)
                running[_start(trial, config, slot, threads, forgetting)] = (trial, slot, time.monotonic())
            time.sleep(POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                trial, slot, since = running.pop(process)
                free.append(slot)
                done = len(trials) - len(waiting) - len(running)
                words = f"{trial.folder.name}, {time.monotonic() - since:.0f} s: {_last_words(trial)}"
                if process.returncode:
                    failed.append(trial)
                    words = f"FAILED with exit code {process.returncode}: {words}; see {trial.folder / 'logs'}"
                console.print(f"{time.monotonic() - started:5.0f} s  {done}/{len(trials)}  {escape(words)}")
    finally:
        _end(list(running))
    return failed


def _start(trial: Trial, config: Path, gpu: str | None, threads: int, forgetting: Path | None) -> Process:
    logs = trial.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str] = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **os.environ}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    command = [sys.executable, "-m", CHILD, str(config), *trial.overrides]
    command += ["--forgetting", str(forgetting)] if forgetting is not None else []
    with open(logs / "console.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _last_words(trial: Trial) -> str:
    lines = (trial.folder / "logs" / "console.log").read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _end(processes: Sequence[Process]) -> None:
    """Stop running processes: first SIGTERM, then SIGKILL."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_S
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # the time limit is for all together
    finally:  # also if a second signal ends the wait
        for process in processes:
            process.kill()
            process.wait()


def _first_difference(
    old: Mapping[str, Any], new: Mapping[str, Any], ignored: set[str], prefix: str = ""
) -> str | None:
    """Return `setting was X and is Y` for the first setting that differs, or None."""
    for key in sorted({*old, *new}):
        name, was, now = prefix + key, old.get(key), new.get(key)
        if name in ignored:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            if inner := _first_difference(was, now, ignored, f"{name}."):
                return inner
        elif was != now:
            return f"{name} was {was!r} and is {now!r}"
    return None
