"""`python -m benchmarks.tiers NAME|all|FILE`: run real trainings on one GPU and assert their results.

A tier is `configs/tier_NAME.yaml`, or a user's file with a section `tier`, run by `zerolora train`;
benchmarks/tiers/checks.py checks the files the run wrote. Real weights are used if this machine has them. Otherwise the
model has its true shape and random weights, and the assertions that need real weights are listed as not made. Exit code
0: all held; 1: an assertion or a run failed; 2: usage.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks.tiers import checks
from benchmarks.tiers.checks import Check, TierRun
from benchmarks.tiers.machine import (
    CPU,
    Baselines,
    Machine,
    Weights,
    cache_folder,
    cpu_time,
    find_data,
    find_template,
    find_weights,
    this_machine,
)
from trainer.config import CommandParser, RunConfig, UserError, load_config
from trainer.contract.exit_codes import get_signal_exit_code
from trainer.contract.home import ZEROLORA_HOME
from trainer.contract.launcher_process import export_launcher_identity
from trainer.monitor.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]
POLL_S = 0.3
EXIT_INTERRUPTED = get_signal_exit_code(signal.SIGINT)
EXAMPLES = """examples:
  zerolora tier quick                        one tier, in a minute
  zerolora tier all --without full           without the 7B model
  zerolora tier all --json > verdicts.json   for a machine to read
  zerolora tier memory --models ~/models     weights of your own folder
  zerolora tier quick tier.seconds=60        with another limit, or any other setting
  zerolora tier mine.yaml                    your own configuration and the limits in its section `tier`
  zerolora tier quick --cpu                  without a GPU; memory and time are then not asserted"""


Assertions = tuple[checks.Checker, ...]


@dataclass(frozen=True)
class Tier:
    """One line of the table in docs/guide/tiers.md, or a user's configuration."""

    name: str
    shape: str
    needs_gib: float
    """Free GPU memory required to start it (--check-vram)."""
    asserts: Callable[[RunConfig], Assertions]
    resume_at: int | None = None
    """Checkpoint from which a second run resumes."""
    file: Path | None = None
    """A user's configuration, which brings its own model and data."""
    overrides: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.file or ZEROLORA_HOME / "configs" / f"tier_{self.name}.yaml"

    @property
    def config(self) -> RunConfig:
        """Load the configuration with its overrides. Raises UserError."""
        return load_config(self.path, self.overrides).config

    @property
    def checks(self) -> Assertions:
        """Return the assertions about the run. Raises UserError if one of their limits is missing."""
        return self.asserts(self.config)


def _set(limit: float | None, name: str) -> float:
    if limit is None:
        raise UserError(f"tier.{name}: missing in the tier's file, but required; set a number")
    return limit


def _quick(config: RunConfig) -> Assertions:
    memory = checks.peak_memory(_set(config.tier.peak_memory_gib, "peak_memory_gib"))
    return checks.finished_within(_set(config.tier.seconds, "seconds")), checks.finite, checks.adapters_moved, memory


def _memory(config: RunConfig) -> Assertions:
    _set(config.tier.peak_memory_gib, "peak_memory_gib")
    return _as_limited(config)


def _convergence(config: RunConfig) -> Assertions:
    _set(config.tier.loss_fall, "loss_fall")
    return _as_limited(config)


def _extended(config: RunConfig) -> Assertions:
    memory = checks.peak_memory(_set(config.tier.peak_memory_gib, "peak_memory_gib")), checks.memory_is_flat
    return checks.finite, *memory, checks.throughput_holds, checks.smoothed_loss_falls


def _full(config: RunConfig) -> Assertions:
    whole = checks.checkpoints_are_whole(495, 990, 1000)
    return *_memory(config), whole, checks.resumes, checks.loss_fell(_set(config.tier.loss_fall, "loss_fall"))


def _as_limited(config: RunConfig) -> Assertions:
    """Check for finite values and moved adapters, if any, and each limit that the file sets."""
    limits = config.tier
    found: list[checks.Checker] = [checks.finite]
    if config.adapter != "none":
        found.append(checks.adapters_moved)
    if limits.seconds is not None:
        found.append(checks.finished_within(limits.seconds))
    if limits.loss_fall is not None:
        found.append(checks.loss_fell(limits.loss_fall))
        found += [checks.held_out_loss_fell] if config.dataset.evaluation or config.dataset.val_split else []
    if limits.peak_memory_gib is not None:
        found.append(checks.peak_memory(limits.peak_memory_gib))
    return tuple(found)


TIERS = {
    tier.name: tier
    for tier in (
        Tier("quick", "smollm2-135m", 0.25, _quick),
        Tier("convergence", "smollm2-135m", 2.0, _convergence),
        Tier("convergence_qlora", "smollm2-135m", 1.0, _convergence),
        Tier("memory", "tinyllama-1.1b", 2.0, _memory),
        Tier("extended", "tinyllama-1.1b", 2.0, _extended),
        Tier("full", "llama2-7b", 12.0, _full, resume_at=990),
    )
}


@dataclass(frozen=True)
class Outcome:
    tier: str
    model: str
    passed: bool
    seconds: float
    checks: tuple[Check, ...]
    problem: str | None = None
    """Reason why no assertion was checked, if the run failed or was skipped."""


class Runner:
    """Run tiers one after the other and print their outcomes."""

    def __init__(self, options: argparse.Namespace, machine: Machine, console: Console) -> None:
        self.options, self.machine, self.console = options, machine, console

    def run(self, tier: Tier) -> Outcome:
        """Run one tier, from preparing its data to checking its assertions."""
        weights = self._weights(tier)
        self._announce(tier, weights)
        needed = tier.needs_gib + self.machine.context_gib
        if self.options.check_vram and self.machine.free_gib is not None and self.machine.free_gib < needed:
            problem = f"needs {needed:.1f} GiB free on the card, which has {self.machine.free_gib:.1f}"
            return self._conclude(Outcome(tier.name, weights.model, False, 0.0, (), f"not run: {problem}"))
        folder = self.options.output / tier.name
        overrides = [f"base_model={weights.model}"]
        if tier.file is None:
            overrides += [*find_data(tier.path), *find_template(weights.model)]
        started = time.monotonic()
        code = self._train(tier, folder, overrides)
        seconds = time.monotonic() - started
        last, resumed = folder, self.options.output / f"{tier.name}-resumed"
        if code == 0 and tier.resume_at is not None:
            checkpoint = folder / f"checkpoint-{tier.resume_at}"
            last = resumed
            code = self._train(tier, resumed, [*overrides, f"training.resume_from_checkpoint={checkpoint}"])
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            problem = f"zerolora train ended with exit code {code}; see {last / 'logs'}"
            return self._conclude(Outcome(tier.name, weights.model, False, seconds, (), problem))
        config = tier.config
        finished = TierRun(
            folder,
            read_metrics(folder),
            config.training.max_steps or 0,
            seconds,
            on_gpu=self.machine.on_gpu,
            real_weights=weights.real,
            limits=config.tier,
            resumed=read_metrics(resumed) if tier.resume_at is not None else (),
        )
        made = (*(check(finished) for check in tier.checks), *self._baseline(tier, finished))
        whole = time.monotonic() - started
        held = all(check.passed is not False for check in made)
        return self._conclude(Outcome(tier.name, weights.model, held, whole, made))

    def _weights(self, tier: Tier) -> Weights:
        if tier.file is None:
            return find_weights(tier.path, tier.shape, self.options.base_model, self.options.models)
        model = self.options.base_model or tier.config.base_model
        return Weights(model, not model.startswith("random:"), f"as {tier.file} names it")

    def _baseline(self, tier: Tier, run: TierRun) -> tuple[Check, ...]:
        """Compare throughput with this card's record; write the record if there is none, or on request."""
        rate = checks.tokens_per_second(run)
        if rate is None:
            return ()
        baselines = Baselines(self.options.baselines, self.machine.card)
        known = None if self.options.new_baseline else baselines.read(tier.name)
        if known is None:
            baselines.keep(tier.name, rate)
        return (checks.against_baseline(run, known),)

    def _announce(self, tier: Tier, weights: Weights) -> None:
        self.console.print(f"[bold]{tier.name}[/bold]  {escape(weights.model)}: {escape(weights.text)}", soft_wrap=True)
        if not self.machine.on_gpu:
            minutes = math.ceil(cpu_time(tier.config, weights.model) / 60)
            self.console.print(f"  on the CPU: about {minutes // 60} h {minutes % 60:02d} min", soft_wrap=True)

    def _train(self, tier: Tier, folder: Path, overrides: list[str]) -> int:
        """Run `zerolora train` on one GPU, or one CPU rank; return its exit code."""
        command = [sys.executable, "-m", "launcher.cli", "train", str(tier.path), *overrides, *tier.overrides]
        command += [f"output_dir={folder}", "output.overwrite=delete", "--num-gpus", "1"]
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": search}
        if not self.machine.on_gpu:
            environment["DS_ACCELERATOR"] = CPU
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--output {self.options.output}: cannot be written ({error.strerror}); use another folder"
            ) from None
        log = folder.with_suffix(".log")
        with contextlib.ExitStack() as stack:
            output: Any = sys.stderr if self.options.verbose else stack.enter_context(log.open("wb"))
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            stack.callback(_end, process)
            status = None if self.options.verbose else stack.enter_context(self.console.status("starting"))
            while (code := process.poll()) is None:
                time.sleep(POLL_S)
                if status is not None:
                    status.update(f"{folder.name}: {_last_step(folder)}")
        if code and not self.options.verbose:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
            self.console.print("\n".join(f"  {escape(line)}" for line in last), soft_wrap=True)
        return code

    def _conclude(self, outcome: Outcome) -> Outcome:
        marks = {True: "[green]held[/green]  ", False: "[red]BROKEN[/red]", None: "[yellow]not made[/yellow]"}
        for check in outcome.checks:
            self.console.print(f"  {marks[check.passed]}  {check.name}: {escape(check.text)}", soft_wrap=True)
        if outcome.problem:
            self.console.print(f"  [red]{escape(outcome.problem)}[/red]", soft_wrap=True)
        verdict = "[green]passed[/green]" if outcome.passed else "[red]FAILED[/red]"
        self.console.print(f"  {verdict} in {outcome.seconds:.0f} s\n", soft_wrap=True)
        return outcome


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let a run that is still alive save and stop."""
    if process.poll() is None:
        process.terminate()
        process.wait()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _last_step(folder: Path) -> str:
    """Return the last step of a run from the end of its metrics."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return "starting"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().split(b"\n")[:-1]
    return f"step {json.loads(lines[-1])['step']:.0f}" if len(lines) > 1 else "starting"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora tier",
        description="Real runs on one GPU, and what must be true of each; docs/guide/tiers.md.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(TIERS)}, all, or a YAML file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument(
        "--check-vram", action="store_true", help="first check that the card has enough memory for the tier"
    )
    parser.add_argument("--verbose", action="store_true", help="show the runs themselves")
    parser.add_argument("--json", action="store_true", help="the verdicts as JSON on stdout")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, however long that takes")
    parser.add_argument("--stop-on-failure", action="store_true", help="do not continue with the next tier")
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder of models, by the last part of their names")
    parser.add_argument("--base-model", metavar="MODEL", help="folder of the model of this one tier, or random:SHAPE")
    parser.add_argument("--output", type=Path, default=Path("runs/tiers"), help="folder of the runs (runs/tiers)")
    add = parser.add_argument
    add("--without", action="append", default=[], metavar="NAME", help="leave this tier out of `all`; may be repeated")
    add("--baselines", type=Path, default=cache_folder() / "tiers", metavar="DIR", help="where throughput is kept")
    add(
        "--new-baseline",
        action="store_true",
        help="replace the stored baseline of this GPU",
    )
    return parser.parse_intermixed_args(argv)


def _chosen(options: argparse.Namespace) -> list[Tier]:
    """Return the tiers to run, with the overrides of the command line. Raises UserError."""
    overrides = tuple(options.settings)
    if options.output.is_file():
        raise UserError(f"--output {options.output}: is a file; use a folder")
    if options.name == "all":
        if options.base_model:
            raise UserError(f"--base-model {options.base_model}: every tier has its own model; choose one tier")
        if unknown := [name for name in options.without if name not in TIERS]:
            raise UserError(f"--without {unknown[0]}: no such tier; choose from {', '.join(TIERS)}")
        tiers = [tier for name, tier in TIERS.items() if name not in options.without]
    elif options.without:
        raise UserError(f"--without {options.without[0]}: needs `all`, not {options.name}")
    elif options.name in TIERS:
        tiers = [TIERS[options.name]]
    elif options.name.endswith((".yaml", ".yml")):
        file = Path(options.name)
        tiers = [Tier(file.stem, "", 0.0, _as_limited, file=file)]
    else:
        raise UserError(f"{options.name}: no such tier; choose from {', '.join(TIERS)}, all, or use a YAML file")
    tiers = [replace(tier, overrides=overrides) for tier in tiers]
    for tier in tiers:
        _ = tier.checks  # find mistakes in every file before the first run
    return tiers


def _as_json(outcomes: list[Outcome], machine: Machine) -> str:
    document: dict[str, Any] = {"machine": machine.text, "passed": all(outcome.passed for outcome in outcomes)}
    return json.dumps(document | {"tiers": [asdict(outcome) for outcome in outcomes]}, indent=1)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every possible assertion held, 1 if not, 2 after a mistake, 130 after Ctrl-C."""
    options = _parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    export_launcher_identity()
    console = Console(stderr=options.json, highlight=False)
    outcomes: list[Outcome] = []
    try:
        tiers = _chosen(options)
        machine = this_machine(cpu=options.cpu)
        console.print(f"[bold]{escape(machine.text)}[/bold]\n", soft_wrap=True)
        runner = Runner(options, machine, console)
        for tier in tiers:
            outcomes.append(runner.run(tier))
            if options.stop_on_failure and not outcomes[-1].passed:
                break
            if options.check_vram and tier is not tiers[-1]:
                runner.machine = replace(machine, free_gib=this_machine(cpu=options.cpu).free_gib)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    if options.json:
        print(_as_json(outcomes, machine))
    failed = [outcome.tier for outcome in outcomes if not outcome.passed]
    unmade = sum(check.passed is None for outcome in outcomes for check in outcome.checks)
    words = f"{len(outcomes) - len(failed)} of {len(tiers)} tiers passed"
    words += f", {unmade} assertions could not be made" if unmade else ""
    total = sum(outcome.seconds for outcome in outcomes)
    console.print(f"[bold]{words}[/bold] in {total:.0f} s{': failed ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
