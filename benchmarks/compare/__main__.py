"""`zerolora compare CONFIG`: compare controllers of the SCU on one model and data set, with several seeds each.

A trial is one (measure, controller, lambda, seed). Each runs in its own process, benchmarks/compare/trial.py, in
DIR/<name>: one after another, several at once on one GPU, or spread over GPUs. There is no launcher: a single rank
needs none, and DeepSpeed's would add the seconds its two processes take to start. Finished trials are recognized by
their settings and skipped; an interrupted one starts again.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from benchmarks.compare.plots import draw_comparison
from benchmarks.compare.report import NOTES, result_tables, statements, write_results
from benchmarks.compare.results import Comparison, read_results
from benchmarks.compare.trials import CONTROLLERS, MEASURES, Trial, plan, run_trials
from trainer.checkpoint.finished_run import silence_libraries
from trainer.config import CommandParser, RunConfig, UserError, load_config
from trainer.config.command_line import parse_positive_int
from trainer.setup.preflight import prepare

WIDTH = 132
LAMBDAS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)


class _Stopped(Exception):
    """A signal ended the comparison."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0 if done, 1 if a trial failed, 2 for usage errors, 128 + signal when stopped."""
    options = parse(argv)
    # A file has no width: do not truncate the output there.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        return _compare(options, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except _Stopped as stopped:
        print("stopped; run the same command again to continue with the unfinished trials", file=sys.stderr)
        return stopped.exit_code


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _compare(options: argparse.Namespace, console: Console) -> int:
    config = load_config(options.config, [*options.overrides, "scu.enabled=true"]).config
    options.output = options.output or Path(config.output_dir)
    check(config, options)
    trials = plan(options.config, options.overrides, config, options)
    missing = [trial for trial in trials if not trial.is_finished()]
    console.print(f"{len(trials)} trials, {len(trials) - len(missing)} already finished; in {options.output}")
    failed: list[Trial] = []
    if missing:
        silence_libraries()
        # Tokenise before the trials need it at the same time, and find mistakes before the first one starts.
        stats = prepare(missing[0].config).data.stats
        if options.forgetting is not None:
            check_readable(options.forgetting)
        for line in [
            *stats.format_summary(),
            *([] if "kl" in options.measures else [describe_scale(config, stats.target_tokens)]),
        ]:
            console.print(line)
        options.output.mkdir(parents=True, exist_ok=True)
        failed = run_trials(missing, options.config, slots(options), console, options.forgetting)
    measured = [trial for trial in trials if trial not in failed]
    if not measured:
        return 1
    comparison = Comparison(read_results(measured), draws=options.draws)
    show(comparison, options.output, console)
    return 1 if failed else 0


def show(comparison: Comparison, folder: Path, console: Console) -> None:
    """Print table and statements, and write them with the figures and plots into `folder`."""
    for table in result_tables(comparison):
        console.print(table, "", soft_wrap=False)
    for line in [*NOTES, "", *statements(comparison)]:
        console.print(line)
    written = [*write_results(comparison, folder), *draw_comparison(comparison, folder)]
    console.print("written: " + ", ".join(str(path) for path in written))


def describe_scale(config: RunConfig, target_tokens: int) -> str:
    """Describe the weight of lambda: the regulariser in nats per token for a given size of the adapter."""
    tokens = config.scu.tokens or target_tokens
    sigma = float(config.scu.sigma)
    weight = 1.0 / (2.0 * sigma**2 * tokens)
    return (
        f"the regulariser, lambda ln 2 ParamBPT = lambda Q / (2 sigma^2 N), is {weight:.3g} lambda Q nats/token with "
        f"sigma = {sigma:g} and N = {tokens:,}; Q is the sum of squares of the measure"
    )


def check(config: RunConfig, options: argparse.Namespace) -> None:
    """Raise UserError for settings that cannot be compared."""
    data = config.dataset
    if data.evaluation is None and not data.val_split:
        raise UserError("dataset.evaluation: missing, but the comparison needs held-out data; set dataset.evaluation")
    if data.val_split and options.seeds > 1:
        raise UserError(
            f"dataset.val_split={data.val_split}: each of {options.seeds} seeds would hold out different documents; "
            "set dataset.evaluation"
        )
    if data.packing or data.streaming:
        name = "packing" if data.packing else "streaming"
        raise UserError(f"dataset.{name}=true: documents are measured one by one; set dataset.{name}: false")
    if not config.training.eval_steps:
        raise UserError(
            "training.eval_steps=0: evaluations during training find the best held-out loss; set it to 50, for example"
        )
    if options.targets and len(options.measures) > 1 and len(options.targets) != len(options.measures):
        raise UserError(f"--targets: {len(options.targets)} for {len(options.measures)} measures; pass one per measure")
    if "kl" in options.measures and options.measures != ["kl"]:
        raise UserError("--measures: lambda of kl has another scale than the others; compare it separately")


def check_readable(path: Path) -> None:
    """Raise UserError unless `path` is a non-empty file."""
    try:
        if path.stat().st_size:
            return
        problem = "is empty"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise UserError(f"--forgetting={path}: {problem}; use a file of texts, such as .txt or .jsonl")


def slots(options: argparse.Namespace) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each concurrent process; None leaves it unchanged, without a GPU."""
    gpus: Sequence[str | None] = options.gpus
    if not gpus and torch.cuda.is_available():
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
    gpus = gpus or [None]
    parallel = options.parallel or len(gpus)
    return [gpus[index % len(gpus)] for index in range(parallel)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options; lists of lambdas are sorted and unique."""
    parser = CommandParser(
        prog="zerolora compare",
        description="Controllers of the Shannon Control Unit side by side: one run each per lambda and seed, a table "
        "of held-out bits per token with intervals, CSV, JSON and plots. Run it again to continue after a stop.",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of all runs and results (output_dir)")
    parser.add_argument(
        "--seeds", type=parse_positive_int, default=3, metavar="N", help="seeds: the file's and those after it (3)"
    )
    parser.add_argument(
        "--controllers", type=_controllers, default=CONTROLLERS, metavar="LIST", help=f"some of {','.join(CONTROLLERS)}"
    )
    parser.add_argument(
        "--measures",
        type=_measures,
        default=("delta",),
        metavar="LIST",
        help="the measures delta, factors or both; or kl (delta)",
    )
    listed = ",".join(f"{value:g}" for value in LAMBDAS)
    parser.add_argument("--lambdas", type=_positives, default=LAMBDAS, metavar="LIST", help=f"fixed ones ({listed})")
    parser.add_argument(
        "--ramps", type=_positives, metavar="LIST", help="final values of linear and cosine (the middle of --lambdas)"
    )
    parser.add_argument(
        "--targets", type=_positives, metavar="LIST", help="targets of PI, with one run each (scu.target)"
    )
    parser.add_argument(
        "--forgetting", type=Path, metavar="FILE", help="text on which to measure the distance from the base too"
    )
    parser.add_argument("--parallel", type=parse_positive_int, metavar="N", help="concurrent processes (1 per GPU)")
    parser.add_argument("--gpus", type=_words, default=(), metavar="LIST", help="GPUs to spread over (all)")
    parser.add_argument(
        "--draws", type=parse_positive_int, default=2000, metavar="B", help="bootstrap resamples (2000)"
    )
    options = parser.parse_intermixed_args(argv)
    options.lambdas = sorted(set(options.lambdas))
    options.ramps = sorted(set(options.ramps or [options.lambdas[len(options.lambdas) // 2]]))
    return options


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r}: has an empty entry; remove it")
    return words


def _controllers(text: str) -> list[str]:
    return _chosen(text, CONTROLLERS)


def _measures(text: str) -> list[str]:
    return _chosen(text, MEASURES)


def _chosen(text: str, known: Sequence[str]) -> list[str]:
    words = _words(text)
    for word in words:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word}: choose from {', '.join(known)}")
    return list(dict.fromkeys(words))


def _positives(text: str) -> list[float]:
    values = []
    for word in _words(text):
        with suppress(ValueError):
            if 0.0 < float(word) < math.inf:
                values.append(float(word))
                continue
        raise argparse.ArgumentTypeError(f"{word}: must be a positive number, such as 0.1")
    return values


if __name__ == "__main__":
    sys.exit(main())
