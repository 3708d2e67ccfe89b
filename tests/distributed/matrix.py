"""Many training runs in one set of ranks, because starting ranks costs more than training a tiny model.

deepspeed --module tests.distributed.matrix FOLDER PLAN.json     PLAN: [{"name", "overrides": {...}, "like"?}, ...]
Each case is a whole `Run` in FOLDER/<name>; what it measured is in its metrics.jsonl. A loss that is not finite ends
its case alone, and makes the exit code 1; anything else ends all.
"""

import argparse
import gc
import json
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

import trainer.loop
import trainer.monitor.report.plots
from trainer.config import load_config
from trainer.contract.folder_lock import FolderLock
from trainer.preflight import prepare
from trainer.ranks.group import Ranks, end_process, leave_process_group
from trainer.ranks.signals import StopRequest
from trainer.run import Run


def leave_out_what_one_run_does_once() -> None:
    """Plots as PNGs, and a look at every object that libraries made: two thirds of the time of a tiny run."""
    trainer.monitor.report.plots.draw_plots = lambda *_, **__: {}
    trainer.loop.garbage_of_steps_only = nullcontext


def run_case(folder: Path, case: dict[str, object], ranks: Ranks, stop: StopRequest) -> None:
    """Train one case; `case["name"]` is its output folder unless it continues another's."""
    overrides = dict(case["overrides"])  # type: ignore[call-overload]
    overrides.setdefault("output_dir", str(folder / str(case["name"])))
    loaded = load_config(folder / "base.yaml", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    log = folder / f"{case['name']}-console-{ranks.rank}.txt"
    folder_of_case = Path(loaded.config.output_dir)
    held = FolderLock.take(folder_of_case, resumes=False, say=print) if ranks.is_main else nullcontext()
    with log.open("w") as file, held as lock:
        Run(loaded, prepare(loaded.config), ranks, Console(file=file, width=140), stop, lock).train()
    (folder / f"{case['name']}-done-{ranks.rank}").touch()
    # The next case's look for garbage, and Python's own, pass over what is here to stay.
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan", type=Path)
    arguments = parser.parse_args()
    leave_out_what_one_run_does_once()
    ranks, stop = Ranks.from_environment(), StopRequest()
    diverged = False
    for case in json.loads(arguments.plan.read_text()):
        try:
            run_case(arguments.folder, case, ranks, stop)
        except FloatingPointError as error:  # on every rank, so that the next case can follow
            diverged = True
            (arguments.folder / f"{case['name']}-diverged-{ranks.rank}.txt").write_text(str(error))
    leave_process_group()
    return 1 if diverged else 0


if __name__ == "__main__":
    end_process(main())
