"""Many training runs in one set of ranks, because starting ranks costs more than training a tiny model.

deepspeed --module tests.distributed.matrix FOLDER PLAN.json     PLAN: [{"name", "overrides": {...}, "like"?}, ...]
Each case is a whole `Run` in FOLDER/<name>; what it measured is in its metrics.jsonl. The exit code is 1 if one failed.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path

from rich.console import Console

from trainer.config import load_config
from trainer.prepare import prepare
from trainer.ranks import Ranks, leave_process_group
from trainer.run import Run
from trainer.signals import StopRequest


def run_case(folder: Path, case: dict[str, object], ranks: Ranks, stop: StopRequest) -> None:
    """Train one case; `case["name"]` is its output folder unless it continues another's."""
    overrides = dict(case["overrides"])  # type: ignore[call-overload]
    overrides.setdefault("output_dir", str(folder / str(case["name"])))
    loaded = load_config(folder / "base.yaml", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    log = folder / f"{case['name']}-console-{ranks.rank}.txt"
    with log.open("w") as file:
        Run(loaded, prepare(loaded.config), ranks, Console(file=file, width=140), stop).train()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan", type=Path)
    arguments = parser.parse_args()
    ranks, stop = Ranks.from_environment(), StopRequest()
    failures = 0
    for case in json.loads(arguments.plan.read_text()):
        try:
            run_case(arguments.folder, case, ranks, stop)
        except Exception:  # some cases fail on purpose, and all that follow have tests of their own that need them
            failures += 1
            (arguments.folder / f"{case['name']}-failed-{ranks.rank}.txt").write_text(traceback.format_exc())
            traceback.print_exc()
            if ranks.world_size > 1:
                return 1  # the other ranks may wait in a collective: the launcher ends them
    leave_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
