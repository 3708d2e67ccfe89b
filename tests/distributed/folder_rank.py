"""Four runs after each other in FOLDER/out, in one process: begun, moved aside, deleted, and one that loses the folder.

python -m tests.distributed.folder_rank FOLDER      FOLDER/seen-N.json: {path: content or size} of all files after run N
"""

import json
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from trainer.config import load_config
from trainer.contract.folder_lock import LOCK_FILE, FolderLock, FolderLostError
from trainer.contract.whole_files import write_text_atomic
from trainer.monitor.metrics import METRICS_FILE
from trainer.parallel.ranks.group import Ranks, exit_process, leave_process_group
from trainer.parallel.ranks.signals import StopRequest
from trainer.run import Run
from trainer.setup.preflight import prepare


def train(folder: Path, *overrides: str) -> None:
    loaded = load_config(folder / "base.yaml", [f"output_dir={folder / 'out'}", "training.save_steps=2", *overrides])
    prepared = prepare(loaded.config)
    with FolderLock.acquire(folder / "out", resumes=False, log=print) as lock, open(folder / "console.txt", "a") as log:
        Run(loaded, prepared, Ranks(0, 1, 0), Console(file=log, width=140), StopRequest(), lock).train()


def note(folder: Path, number: int) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("out*/**/*") if path.is_file()}
    (folder / f"seen-{number}.json").write_text(json.dumps(files))


def lose(folder: Path) -> None:
    """As soon as the last run has a checkpoint of its own another run, of another host, takes the folder over."""
    while not (folder / "out" / "checkpoint-4").exists():
        time.sleep(0.01)
    holder = {"host": "n7", "process": {"kernel": "n7", "pid": 1, "started": "1"}}
    values = {"token": "t7", "since": "now", "job": "", "restarts": 0, "holders": [holder]}
    write_text_atomic(folder / "out" / "logs" / LOCK_FILE, json.dumps(values))  # the run may read it at any time


def main() -> int:
    folder = Path(sys.argv[1])
    train(folder)
    (folder / "out" / "notes.txt").write_text("mine")
    note(folder, 1)
    train(folder, "output.overwrite=true", "training.max_steps=2")
    (folder / "out" / "notes.txt").write_text("mine")
    note(folder, 2)
    train(folder, "output.overwrite=delete", "training.max_steps=3")
    note(folder, 3)
    threading.Thread(target=lose, args=[folder], daemon=True).start()
    try:
        train(folder, "output.overwrite=delete", "training.max_steps=2000")
    except FolderLostError as error:
        (folder / "lost.txt").write_text(str(error))
    lines = (folder / "out" / METRICS_FILE).read_text().splitlines()
    (folder / "last-step.txt").write_text(str(json.loads(lines[-1])["step"]))
    note(folder, 4)
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
