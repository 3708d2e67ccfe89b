"""Kill rank 1 of a run repeatedly, 1 to 5 s after the first new step, and compare its losses."""

import json
import random
import time
from functools import partial
from pathlib import Path

import psutil

from tests.chaos.workplace import Chaos, adapter, commit, damaged, start, steps_lost
from trainer.contract.heartbeat import read_heartbeats
from trainer.contract.restart_record import read_restarts

# A step of a tenth of a second or more.
SETTINGS = (
    "training.gradient_accumulation_steps=8",
    "training.save_steps=5",
    "training.save_total_limit=3",
    "training.eval_steps=0",
    "training.hang_timeout=5",
)
STEPS_PER_KILL = 30


def run_series(folder: Path, kills: int, until: float) -> bool:
    """True if the run ended with the losses and the adapter of the undisturbed one; writes series.json.

    A run that exceeds its time is stopped, and its losses are compared up to there.
    """
    steps = f"training.max_steps={STEPS_PER_KILL * kills}"
    calm = start(folder, folder / "series-calm", *SETTINGS, steps)
    assert calm.end() == 0, calm.text
    run = start(folder, folder / "series", *SETTINGS, steps, "training.max_restarts=200")
    made, began = _kill(run, kills, until), time.monotonic()
    cut = made < kills and run.process.poll() is None
    if cut:
        run.launcher().terminate()
    code = run.end()
    (folder / "series.txt").write_text(run.text)
    undisturbed, disturbed = losses(calm.out), losses(run.out)
    result = {
        "kills": made,
        "kills_meant": kills,
        "commit": commit(),
        "restarts": len(read_restarts(run.out)),
        "code": code,
        "steps": len(disturbed),
        "steps_lost": steps_lost(run.out),
        "cut": cut,
        "losses_equal": disturbed == undisturbed[: len(disturbed)] if cut else disturbed == undisturbed,
        "adapter_equal": None if cut else adapter(run.out) == adapter(calm.out),
        "damaged": damaged(run.out),
        "seconds_after_the_last_kill": round(time.monotonic() - began, 1),
        "restarted_in": [restart.step for restart in read_restarts(run.out)],
        "losses": disturbed,
        "undisturbed": undisturbed,
    }
    (folder / "series.json").write_text(json.dumps(result, indent=1))
    print({name: value for name, value in result.items() if not name.endswith(("losses", "disturbed"))})
    return (cut or code == 0) and result["losses_equal"] is True and result["adapter_equal"] is not False


def _kill(run: Chaos, kills: int, until: float) -> int:
    """How many kills were made before the run was over, or the time was."""
    draw, furthest, made = random.Random(0), 0, 0
    while made < kills and run.process.poll() is None and time.monotonic() < until:
        beats = read_heartbeats(run.out / "logs")
        step = max((beat.step for beat in beats.values()), default=0)
        # A step beyond all that were made before, and by the ranks of now.
        if 1 not in beats or step <= furthest + 1 or not beats[1].has_completed_step:
            time.sleep(0.05)
            continue
        time.sleep(draw.uniform(1.0, 5.0))
        pid = beats[1].pid
        if psutil.pid_exists(pid) and run.process.poll() is None:
            psutil.Process(pid).kill()
            made += 1
            run.wait_for(partial(_has_restarted, run.out, len(read_restarts(run.out))))
        furthest = max(furthest, *(restart.step for restart in read_restarts(run.out)), 0)
    return made


def _has_restarted(out: Path, before: int) -> bool:
    return len(read_restarts(out)) > before


def losses(out: Path) -> list[float]:
    """The training loss of every step."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]
