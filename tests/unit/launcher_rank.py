"""A rank without a model: what `zerolora train` starts in the launcher's tests. Arguments: behaviour, folder."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

SAVE_S, LONG_SAVE_S = 2.0, 11.0


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    behaviour, folder = arguments[0], Path(arguments[1])
    rank = int(os.environ["RANK"])
    assert os.environ["WORLD_SIZE"] == "2"
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
    log = os.open(folder / "logs" / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if rank == 0:
        with open(int(arguments[arguments.index("--console") + 1]), "w") as console:
            print(f"console line of {behaviour}", file=console)
    beat = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "step": 7, "phase": "backward"}
    beat |= {"collective": None, "place": None, "collectives_begun": None, "idle_s": 0.0, "stuck": False}
    beat |= {"exit_code": None, "free_memory_gib": 8.0, "free_shm_gib": 8.0, "time": time.time()}
    if behaviour != "early":
        # The step is written at its begin, the rest every two seconds.
        (folder / "logs" / f"heartbeat-{rank}.json").write_text(f"{json.dumps(beat)}\n{9 + rank}\n")
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    if behaviour == "finish":
        return 0
    if rank == 1 and behaviour == "raise":
        raise ValueError("the middle of the model is missing")
    if rank == 1 and behaviour.startswith("folder"):
        while (folder / "logs").exists():
            time.sleep(0.05)
        raise OSError("no file server")
    if behaviour == "both killed":
        wait_for_the_other(folder, rank)
    if (behaviour == "killed" and rank == 1) or behaviour == "both killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour in ("deaf", "early") or (behaviour == "alone" and rank == 1):  # as in a collective of NCCL
        while True:
            time.sleep(1)
    while not received:
        time.sleep(0.05)
    if behaviour == "late":  # after the last agreement a signal ends a rank at once, and another waits for it in vain
        if rank == 1:
            while Path(f"/proc/{(folder / 'ready-0').read_text()}").exists():
                time.sleep(0.05)
            raise ConnectionError("connection closed by peer")
        return 128 + received[0]
    if behaviour == "alone":
        return 128 + received[0]
    if behaviour == "bereaved" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_SAVE_S if behaviour == "bereaved" else SAVE_S)
    (folder / f"saved-{rank}").write_text(signal.Signals(received[0]).name)
    return 75 if received[0] == signal.SIGUSR1 else 128 + received[0]


def wait_for_the_other(folder: Path, rank: int) -> None:
    """Rank 0: wait until rank 1 exists. Rank 1: wait until the launcher has reaped rank 0."""
    other = folder / f"ready-{1 - rank}"
    while not (other.exists() and other.read_text()):
        time.sleep(0.05)
    while rank == 1 and Path(f"/proc/{other.read_text()}").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
