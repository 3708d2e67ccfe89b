"""`zerolora bench`: tokens per second, step time, MFU and peak memory of the product and of peers on this machine.

The product is `zerolora train` itself as a child process (launcher, DeepSpeed engine, SCU, TensorBoard and packing as
configured), on random weights of a named shape and random text that fills every sequence; the peers are in
benchmarks/bench/peers.py. Figures cover the steps after the warm-up, from the trainer's own metrics.jsonl.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.bench.assignment import Assignment, Case
from benchmarks.bench.cases import AS_CONFIGURED, CASES, build_peer_case, count_texts, prepared, resolve, write_texts
from benchmarks.bench.peers import RESULT, STACKS, missing_package
from benchmarks.bench.report import (
    MFU_FORMULA,
    PRODUCT,
    Measurement,
    build_profile_table,
    build_result_table,
    find_product,
    list_failures,
    set_peers_mfu,
)
from benchmarks.bench.trace import Shape, breakdown, categorise_kernels, longest, read_trace
from trainer.checkpoint.run_record import find_commit
from trainer.config import AUTO, CommandParser, RunConfig, UserError
from trainer.config.command_line import parse_positive_int
from trainer.contract.known_versions import read_package_versions
from trainer.contract.launcher_process import export_launcher_identity
from trainer.contract.output_files import check_result_file
from trainer.model.base import load_model_config

ROOT = Path(__file__).parents[2]
TAIL_LINES = 15
# Some peers send usage reports, and wait for minutes without a network.
NO_REPORTS = {"DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}


def main(argv: list[str] | None = None) -> int:
    """Measure, print one table (and the profile) and write the JSON; return 1 if a requested measurement failed."""
    words = sys.argv[1:] if argv is None else argv
    arguments = _parse(words)
    # Treat it as Ctrl-C: the child processes must not outlive this one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    export_launcher_identity()
    try:
        with tempfile.TemporaryDirectory(prefix="zerolora-bench-") as scratch:
            bench = Bench(arguments, words, Path(arguments.keep or scratch).absolute(), Console(width=140))
            bench.run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 1 if any(result.error for result in bench.results) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora bench",
        description="Measure training on this machine: random weights of a named shape, no download.",
    )
    parser.add_argument("settings", nargs="*", metavar="CONFIG|key=value", help="the run to measure")
    parser.add_argument("--shape", help="shape to use instead of that of base_model (default llama3.1-8b)")
    parser.add_argument("--case", action="append", help=f"settings by name, may be repeated: {', '.join(CASES)}")
    parser.add_argument("--steps", type=parse_positive_int, default=20, help="measured steps (default 20)")
    parser.add_argument("--warmup", type=parse_positive_int, default=5, help="steps before them (default 5)")
    parser.add_argument("--num-gpus", type=parse_positive_int, default=1, help="GPUs, or CPU ranks (default 1)")
    parser.add_argument("--peers", action="store_true", help="also measure the other trainers")
    parser.add_argument(
        "--peer", action="append", choices=STACKS, help="measure only this one of them, may be repeated"
    )
    parser.add_argument(
        "--peer-packages",
        action="append",
        default=[],
        metavar="PEER=FOLDER",
        help="packages that this one alone sees, before all others: those of `pip install --target FOLDER`",
    )
    parser.add_argument("--no-product", action="store_true", help="measure only the other trainers")
    parser.add_argument("--profile", action="store_true", help="show the time by category, and the gap to the floor")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--keep", help="keep runs, logs and traces in this folder")
    arguments = parser.parse_intermixed_args(argv)
    for word in arguments.peer_packages:
        stack, _, folder = word.partition("=")
        if stack not in STACKS or not Path(folder).is_dir():
            parser.error(f"--peer-packages {word}: must be PEER=FOLDER, with PEER one of {', '.join(STACKS)}")
    return arguments


class Bench:
    """One invocation: its options and the measurements so far."""

    def __init__(self, arguments: argparse.Namespace, words: Sequence[str], folder: Path, console: Console) -> None:
        self.arguments, self.words, self.folder, self.console = arguments, words, folder, console
        self.results: list[Measurement] = []
        self.profiles: dict[str, Any] = {}
        self.on_gpu = torch.cuda.is_available()
        words_of = (word.partition("=") for word in arguments.peer_packages)
        self.packages = {stack: str(Path(path).absolute()) for stack, _, path in words_of}
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Measure every case of the product, then of each peer; show the table at the end."""
        settings = list(self.arguments.settings)
        config = Path(settings.pop(0)) if settings and "=" not in settings[0] else None
        if self.arguments.json:
            check_result_file(self.arguments.json, f"--json={self.arguments.json}", {"header", "results", "profiles"})
        # Resolve all before the first run, so that a mistake in the last does not waste the others' time.
        self.cases = {
            name: resolve(config, name, self.arguments.shape, settings, self.folder)
            for name in self.arguments.case or [AS_CONFIGURED]
        }
        try:
            if not self.arguments.no_product:
                for name, (run, base_model) in self.cases.items():
                    self._product(name, run, base_model)
            for stack in self.arguments.peer or (STACKS if self.arguments.peers else ()):
                self._peer(stack)
        finally:  # after Ctrl-C too: show the measurements so far
            set_peers_mfu(self.results)
            self._show()

    def _texts(self, run: RunConfig) -> Path:
        arguments, length = self.arguments, run.dataset.max_length
        count = count_texts(run, steps=arguments.warmup + arguments.steps, ranks=arguments.num_gpus)
        return write_texts(self.folder / f"texts-{count}-{length}.jsonl", length, count)

    def _product(self, name: str, run: RunConfig, base_model: str) -> None:
        arguments = self.arguments
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        last = arguments.warmup + arguments.steps
        texts = self._texts(run)
        file = prepared(run, base_model, texts, folder, steps=last, profile=arguments.profile)
        command = [sys.executable, "-m", "launcher.cli", "train", str(file), "--num-gpus", str(arguments.num_gpus)]
        failure = self._call(f"{name}: {PRODUCT}", command, folder / "product.log")
        if failure:
            self.results.append(Measurement(name, PRODUCT, error=failure))
            return
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if "perf/step_ms" in record]
        measured = [record for record in records if arguments.warmup < record["step"] <= last]
        self.results.append(Measurement.from_records(name, measured, read_package_versions()))
        if arguments.profile:
            self._profile(name, run, base_model, folder)

    def _profile(self, name: str, run: RunConfig, base_model: str, folder: Path) -> None:
        """Record the time of the last steps by category, and the time of the single operations on this card."""
        known = load_model_config(base_model, run.model).get_text_config()
        vocabulary, layers = known.vocab_size, known.num_hidden_layers
        try:
            works = categorise_kernels(
                read_trace(folder / "run" / "profile" / "rank-0.json.gz"), Shape(vocabulary, run.lora.r)
            )
            by_category, step_ms, steps = breakdown(works)
        except (OSError, ValueError) as error:  # continue with the other cases
            self.results.append(Measurement(name, PRODUCT, error=f"profile: {error}"))
            return
        command = [sys.executable, "-m", "benchmarks.bench.floor", base_model, "--rank", str(run.lora.r)]
        command += ["--batch-size", str(self._batch_size(name)), "--length", str(run.dataset.max_length)]
        if run.training.gradient_checkpointing in ("non_reentrant", "reentrant"):
            first = run.training.gradient_checkpointing_layers or layers
            command += ["--recompute", str(min(1.0, first / layers))]
        log = folder / "floor.log"
        failure = self._call(f"{name}: floor", command, log)
        self.profiles[name] = {
            "steps": steps,
            "step_ms": step_ms,
            "by_category_ms": by_category,
            "floor_ms": None if failure else json.loads(log.read_text().splitlines()[-1]),
            "longest": {category: longest(works, category) for category in by_category},
        }

    def _peer(self, stack: str) -> None:
        """Measure the cases of one peer in one process, and in a fresh one after a failure."""
        packages = self.packages.get(stack)
        reason = missing_package(stack, packages) or ""
        if not reason and self.arguments.num_gpus > 1 and stack != "deepspeed":
            reason = "measured on one GPU only"
        if reason:
            self.results += [Measurement(name, stack, note=reason) for name in self.cases]
            return
        left = [
            build_peer_case(name, run, base_model, on_gpu=self.on_gpu, batch_size=self._batch_size(name))
            for name, (run, base_model) in self.cases.items()
        ]
        while left:
            log = self.folder / f"{stack}-{left[0].name.replace(' ', '-')}.log"
            title = f"{', '.join(case.name for case in left)}: {stack}"
            failure = self._call(title, self._peer_command(stack, left), log, packages)
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(RESULT)]
            done = [json.loads(line.removeprefix(RESULT)) for line in lines]
            done = done or [{"case": left[0].name, "error": failure or "gave no result"}]
            for result in done:
                case = left.pop(0)
                self.results.append(
                    Measurement(
                        case.name,
                        stack,
                        step_ms=result.get("step_ms", []),
                        tokens=case.batch_size * case.length,
                        peak_gib=result.get("peak_gib"),
                        error=result.get("error", ""),
                        versions=result.get("versions", {}),
                    )
                )

    def _batch_size(self, name: str) -> int:
        """Return the sequences of a micro-batch: as configured, or the number `auto` chose in the product's run."""
        run, _ = self.cases[name]
        if run.training.batch_size != AUTO:
            return run.training.batch_size
        product = find_product(name, self.results)
        if product is None:
            raise UserError("training.batch_size=auto: only the product can resolve it; set a number")
        return round(product.tokens / run.dataset.max_length / run.training.gradient_accumulation_steps)

    def _peer_command(self, stack: str, cases: list[Case]) -> list[str]:
        arguments = self.arguments
        run, _ = self.cases[cases[0].name]
        assignment = Assignment(cases, str(self._texts(run)), arguments.warmup, arguments.steps, str(self.folder))
        file = self.folder / f"{stack}.json"
        file.write_text(json.dumps(asdict(assignment)))
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.num_gpus}"]
        return [
            sys.executable,
            *(ranks if stack == "deepspeed" else []),
            "-m",
            "benchmarks.bench.peers",
            stack,
            str(file),
        ]

    def _call(self, title: str, command: Sequence[str], log: Path, packages: str | None = None) -> str:
        """Run a command and log its output; return an empty string, or after a failure the reason."""
        started = time.monotonic()
        print(f"{title} ...", end="", file=sys.stderr, flush=True)
        paths = os.pathsep.join(path for path in (str(ROOT), packages, os.environ.get("PYTHONPATH")) if path)
        with log.open("wb") as output:
            # Some leave compiled kernels in the working directory.
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=os.environ | NO_REPORTS | {"PYTHONPATH": paths},
            )
            try:
                code = _wait(child)
            finally:
                print(f" {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if code == 0:
            return ""
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        shown = [line for line in lines if not line.startswith(RESULT)][-TAIL_LINES:]
        print("\n".join(f"  {line}" for line in shown), file=sys.stderr, flush=True)
        # zerolora's own error message, or the last line of a peer's traceback.
        reported = [line for line in lines if line.startswith(("error:", "failed:"))]
        reason = (reported or shown or ["no output"])[-1].strip()
        return f"failed with exit code {code}: {reason}"[:300]

    def _show(self) -> None:
        card = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        versions = read_package_versions()
        for result in self.results:
            versions |= result.versions
        header = {
            "card": f"{self.arguments.num_gpus} x {card}",
            "shape": ", ".join(dict.fromkeys(model for _, model in self.cases.values())),
            "versions": versions,
            "commit": find_commit(),
            "command": "zerolora bench " + " ".join(self.words),
            "mfu": MFU_FORMULA,
        }
        for name, value in header.items():
            text = ", ".join(f"{key} {number}" for key, number in value.items()) if isinstance(value, dict) else value
            self.console.print(f"{name:<9} {text}", soft_wrap=True, markup=False, highlight=False)
        self.console.print(build_result_table(self.results))
        for line in list_failures(self.results):
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
        for name, profile in self.profiles.items():
            self.console.print(f"\n{name}: time of a step by category ({profile['steps']} steps under the profiler)")
            self.console.print(build_profile_table(profile))
        if self.arguments.json:
            results = [result.as_json() for result in self.results]
            record = {"header": header, "results": results, "profiles": self.profiles}
            self.arguments.json.write_text(json.dumps(record, indent=1))


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Return the exit code; on Ctrl-C signal the child twice, which makes it stop at once."""
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        time.sleep(1.0)
        child.send_signal(signal.SIGINT)
        child.wait()
        raise


if __name__ == "__main__":
    sys.exit(main())
