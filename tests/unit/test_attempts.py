"""With which GPUs and settings the launcher starts ranks again: real processes, and the names of six GPUs."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher import rank_slots
from launcher import start as launcher_start
from launcher.plan import LaunchRequest
from launcher.rank_slots import RestartPlanner
from launcher.start import DEFAULT_RESTARTS, AttemptRunner, resolve_max_restarts
from launcher.supervision.remote import SrunRanks
from launcher.targets.local import build_local_command
from launcher.targets.slurm import Allocation
from trainer.config import load_config
from trainer.contract.rendezvous import find_free_port
from trainer.contract.restart_record import read_restarts

RANK = "tests.unit.attempts_rank"
GPUS = [f"GPU-{number}" for number in range(6)]
SETTINGS = """\
base_model: random:smollm2-135m
output_dir: {folder}
dataset: {{path: chats.jsonl}}
training: {{elastic: {elastic}}}
"""
# Two samples on each of six ranks.
RECORDS = {
    "training_config.json": {"training": {"batch_size": 2, "gradient_accumulation_steps": 1}},
    "run.json": {"world_size": 6},
}


@dataclass
class Machine:
    """Six GPUs, and a run on them."""

    folder: Path

    def train(self, *starts: dict[str, Any], elastic: bool) -> int:
        """Return the exit code of a run with these ends of its ranks."""
        (self.folder / "logs").mkdir()
        (self.folder / "gpus.json").write_text(json.dumps(GPUS))
        (self.folder / "starts.json").write_text(json.dumps(starts))
        for name, record in RECORDS.items():
            (self.folder / name).write_text(json.dumps(record))
        config = self.folder / "config.yaml"
        config.write_text(SETTINGS.format(folder=self.folder, elastic=str(elastic).lower()))
        build = partial(build_local_command, gpus=list(range(6)), num_gpus=None, port=find_free_port(), module=RANK)
        places = RestartPlanner(LaunchRequest(launcher="local"), self.folder / "logs", build)
        return AttemptRunner([str(self.folder)], load_config(config).config, (build, None), places, None, 1).train()

    def gpus(self, number: int) -> list[str]:
        """Those of one start, in the order of its ranks."""
        return [self._told(number, rank)["gpu"] for rank in range(len([*self.folder.glob(f"start-{number}-*")]))]

    def settings(self, number: int) -> set[str]:
        """What a start adds to the user's words."""
        return {word for word in self._told(number, 0)["words"] if "=" in word}

    def _told(self, number: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"start-{number}-{rank}.json").read_text())
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    there = tmp_path / "gpus.json"
    there.write_text(json.dumps(GPUS))
    monkeypatch.setattr(rank_slots, "list_installed_gpus", lambda: json.loads(there.read_text()))
    monkeypatch.setattr(rank_slots, "build_local_command", partial(build_local_command, module=RANK))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(tmp_path)


def fails(rank: int, begun: int, step: int, *gone: int) -> dict[str, Any]:
    gpus = [name for number, name in enumerate(GPUS) if number not in gone]
    return {"fails": rank, "begun": begun, "step": step, "gpus": gpus}


def ends(begun: int) -> dict[str, Any]:
    return {"fails": None, "begun": begun, "step": begun + 3}


RESUMES = {"training.resume_from_checkpoint=auto", "output.overwrite=false"}
SAME_BATCH = {"training.global_batch_size=12", "training.gradient_accumulation_steps=1"}


@pytest.mark.parametrize("elastic", [True, False])
def test_all_ranks_restart_if_all_slots_are_available(machine: Machine, elastic: bool) -> None:
    assert machine.train(fails(1, 1, 5), ends(4), elastic=elastic) == 0
    assert [machine.gpus(number) for number in (0, 1)] == [list("012345")] * 2
    assert machine.settings(0) == set() and machine.settings(1) == RESUMES


def test_an_elastic_run_continues_without_a_lost_gpu(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the five that are left four divide the 12 samples; the fifth is named."""
    assert machine.train(fails(5, 1, 7, 2), ends(6), elastic=True) == 0
    reported = capfd.readouterr().err
    assert "the driver no longer lists GPU 2" in reported
    assert "continuing with 4 of 6 ranks; 5 ranks cannot split the batch of 12 samples;" in reported
    # What comes after it has another number now.
    assert machine.gpus(1) == list("0123") and machine.settings(1) == RESUMES | SAME_BATCH
    assert [restart.ranks for restart in read_restarts(machine.folder)] == [6]


def test_a_lost_gpu_ends_a_run_that_is_not_elastic(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    assert machine.train(fails(0, 1, 7, 2), elastic=False) == 1
    reported = capfd.readouterr().err
    assert "only 5 of 6 ranks can be started; fix the failed hosts or GPUs, or set training.elastic=true" in reported


def test_a_gpu_on_which_no_step_is_made_again_is_left_out(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    """The place of the second failure counts, and the rank after it has another GPU then."""
    assert machine.train(fails(3, 1, 7), fails(3, 0, 0), ends(6), elastic=True) == 0
    assert "GPU 3 is excluded: it failed again before completing a step" in capfd.readouterr().err
    assert [machine.gpus(number) for number in (1, 2)] == [list("012345"), list("0124")]
    assert machine.settings(2) == RESUMES | SAME_BATCH


def test_one_after_the_other_is_left_out(machine: Machine) -> None:
    """Rank 3 of the third start is on GPU 4, which is the one that is left out with it."""
    assert machine.train(fails(3, 1, 7), fails(3, 0, 0), fails(3, 0, 0), ends(6), elastic=True) == 0
    assert machine.gpus(2) == list("0124") and machine.gpus(3) == list("0125")


def test_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that SLURM queues again is not restarted here, unless it is asked for."""
    in_job = SrunRanks(Allocation(7, ("n1", "n2"), 2))
    for can_be_requeued, most in ((False, DEFAULT_RESTARTS), (True, 0)):
        monkeypatch.setattr(launcher_start, "can_be_requeued", lambda job, found=can_be_requeued: found)
        assert resolve_max_restarts(None, in_job) == most
        assert resolve_max_restarts(5, in_job) == 5
    assert resolve_max_restarts(None, None) == DEFAULT_RESTARTS
