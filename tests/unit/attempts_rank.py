"""A rank without a model, of one of several starts: what test_attempts.py has the launcher start. Argument: the folder.

`starts.json` there says of every start which rank fails (null: none), the step that it began with and the step it came
to, and which GPUs the driver shows from then on.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from trainer.contract.heartbeat import Heartbeat
from trainer.contract.restart_record import read_restarts


def main() -> int:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    number = len(read_restarts(folder))
    start = json.loads((folder / "starts.json").read_text())[number]
    reported = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])], "words": sys.argv}
    (folder / f"start-{number}-{rank}.json").write_text(json.dumps(reported))
    begun, step = start["begun"], start["step"]
    beat = Heartbeat(
        rank=rank, host=socket.gethostname(), pid=os.getpid(), step=step, phase="", collective=None, place=None,
        collectives_begun=None, idle_s=0.0, stuck=False, free_memory_gib=8.0, free_shm_gib=8.0, time=time.time(),
        first_step=begun,
    )  # fmt: skip
    (folder / "logs" / f"heartbeat-{rank}.json").write_bytes(beat.encode() + f"{begun} {step}\n".encode())
    if start["fails"] is None:
        return 0
    there = [folder / "logs" / f"heartbeat-{other}.json" for other in range(int(os.environ["WORLD_SIZE"]))]
    while not all(file.exists() and file.stat().st_size for file in there):
        time.sleep(0.02)
    if rank == start["fails"]:
        (folder / f"checkpoint-{number + 1}").mkdir()
        (folder / f"checkpoint-{number + 1}" / "COMPLETE").write_text("")
        (folder / "gpus.json").write_text(json.dumps(start["gpus"]))
        return 1
    # The others lose it, once the launcher has collected its end.
    failed = json.loads(there[start["fails"]].read_bytes().partition(b"\n")[0])["pid"]
    while Path(f"/proc/{failed}").exists():
        time.sleep(0.05)
    return 1


if __name__ == "__main__":
    sys.exit(main())
