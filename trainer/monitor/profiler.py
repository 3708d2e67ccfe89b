"""Profile the last steps of a run with torch.profiler: one trace per rank, with named ranges.

Traces are written to profile/rank-N.json.gz, for Perfetto or chrome://tracing; `zerolora bench --profile` reads them.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.contract.known_versions import replaces
from trainer.monitor.hooks import Hook
from trainer.parallel.ranks.group import wait_for_device

FOLDER = "profile"
STEP, BACKWARD, OPTIMIZER, SCU = "zerolora: step", "zerolora: backward", "zerolora: optimizer", "zerolora: scu"


@replaces("`engine.backward` and `engine.step`, inside named ranges")
class StepProfiler(Hook):
    """Profiles all steps from `first_step` (1-based) until `finish`."""

    def __init__(
        self, run_dir: Path, rank: int, first_step: int, engine: object, scu_controller: object | None
    ) -> None:
        self._file = run_dir / FOLDER / f"rank-{rank}.json.gz"
        self._first_step = first_step
        self._named = [(engine, "backward", BACKWARD), (engine, "step", OPTIMIZER)]
        if scu_controller is not None:
            self._named.append((scu_controller, "compute_penalty", SCU))
        self._profile: Any = None
        self._range = ExitStack()

    def before_step(self, step: int) -> None:
        if step < self._first_step:
            return
        if self._profile is None:
            for owner, name, label in self._named:
                setattr(owner, name, record_function(label)(getattr(owner, name)))
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            wait_for_device()
            # Shapes distinguish the matrix products of frozen weights from the adapters'.
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        self._range.close()
        self._range.enter_context(record_function(f"{STEP} {step}"))

    def finish(self) -> None:
        """Write the trace, if `first_step` was reached."""
        if self._profile is None:
            return
        self._range.close()
        wait_for_device()
        self._profile.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._file))
        self._profile = None
