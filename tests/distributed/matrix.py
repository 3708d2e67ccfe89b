"""Many training runs in one set of ranks, because starting ranks costs more than training a tiny model.

deepspeed --module tests.distributed.matrix FOLDER PLAN.json     PLAN: [{"name", "overrides": {...}}, ...]
Each case is a whole `Run` in FOLDER/<name>; what it measured is in its metrics.jsonl. A loss that is not finite ends
its case alone, and makes the exit code 1; anything else ends all.
"""

import argparse
import gc
import json
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from tests.runs_in_process import as_one_of_many
from trainer.config import load_config
from trainer.contract.folder_lock import FolderLock
from trainer.entry.joint_run import JointRun
from trainer.parallel.ranks.group import Ranks, exit_process, leave_process_group
from trainer.parallel.ranks.signals import StopRequest
from trainer.run import Run
from trainer.setup.preflight import prepare


def run_case(folder: Path, case: dict[str, object], ranks: Ranks, stop: StopRequest) -> None:
    """Train one case; `case["name"]` is its output folder unless it continues another's."""
    overrides = dict(case["overrides"])  # type: ignore[call-overload]
    overrides.setdefault("output_dir", str(folder / str(case["name"])))
    loaded = load_config(folder / "base.yaml", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    log = folder / f"{case['name']}-console-{ranks.rank}.txt"
    folder_of_case = Path(loaded.config.output_dir)
    held = FolderLock.acquire(folder_of_case, resumes=False, log=print) if ranks.is_main else nullcontext()
    with log.open("w") as file, held as lock, as_one_of_many():
        kind = JointRun if loaded.config.runs else Run
        kind(loaded, prepare(loaded.config), ranks, Console(file=file, width=140), stop, lock).train()
    (folder / f"{case['name']}-done-{ranks.rank}").touch()
    # Looking for garbage, as DeepSpeed does too, takes as long as there are objects: not those that stay.
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan", type=Path)
    arguments = parser.parse_args()
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
    exit_process(main())
