"""The process of a rank on a CPU: the estimate against peaks of real runs, and what is said where there is less."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.tiny import write_chats
from tests.unit.test_memory_families import config_of
from trainer.commands.doctor.probe import estimate_need
from trainer.commands.estimate import build_planner, plan_on_cpu
from trainer.config import LoraSection, ModelSection, UserError, load_config
from trainer.memory import preflight as check
from trainer.memory.bytes import GIB
from trainer.memory.decisions import Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.planner import Lengths, Planner, apply_changes, gib
from trainer.memory.preflight import MemoryPlan, check_host_memory, describe_cpu_memory, plan_for_machine, record_memory
from trainer.model.base import load_model_config
from trainer.setup.preflight import prepare

WITHIN = 0.2
MEASURED = json.loads((Path(__file__).parents[2] / "docs/lab/data/memory_cpu.json").read_text())["runs"]


def planner(run: dict[str, Any]) -> Planner:
    model = load_model_config(f"random:{run['shape']}", ModelSection())
    shapes = read_shapes(model, ModelSection(), LoraSection(r=16))
    return Planner(shapes, Lengths(run["length"], run["length"]), Machine.cpu(run["ranks"], run["precision"]))


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: "-".join(str(value) for value in run.values()))
def test_the_estimate_is_what_a_process_took(run: dict[str, Any]) -> None:
    changes = {"training.batch_size": run["batch"], "dataset.max_length": run["length"], "dataset.packing": True}
    config = apply_changes(config_of(), changes | {"lora.r": 16} | run["settings"])
    assert planner(run).estimate(config).needed == pytest.approx(run["peak_bytes"], rel=WITHIN)


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    run = {"shape": "tiny", "length": 256, "ranks": 2, "precision": "fp32"}
    config, made = config_of(), planner(run)
    return MemoryPlan(config, made.estimate(config), made.decisions(config))


def test_a_host_with_less_is_refused_and_one_that_is_full_warned_of(
    plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "host_memory_left", lambda: (-(2**50), GIB // 8))
    with pytest.raises(UserError, match=r"^memory: 64 ranks of this host take .*ignore_memory_check=true$"):
        check_host_memory(plan, 64)
    ignoring = replace(plan, config=apply_changes(plan.config, {"training.ignore_memory_check": True}))
    assert "warning" in check_host_memory(ignoring, 64).notes[-1]
    monkeypatch.setattr(check, "host_memory_left", lambda: (-(2**50), 2**50))
    assert "warning" in check_host_memory(plan, 2).notes[-1]
    monkeypatch.setattr(check, "host_memory_left", lambda: (2**49, 2**50))
    assert check_host_memory(plan, 2) == plan


def test_estimate_doctor_validate_and_training_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    tree = {
        "base_model": "random:tiny",
        "output_dir": str(tmp_path / "run"),
        "dataset": {"path": str(write_chats(tmp_path / "chats.jsonl", 20)), "cache_dir": str(tmp_path / "cache")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "run.yaml").config
    found = prepare(config)
    planned = plan_for_machine(Machine.cpu(1, "fp32"), config, found, None).found
    estimated = plan_on_cpu(build_planner(config, 1)[0], config).found
    assert planned is not None and estimated is not None
    need, _ = estimate_need(config, 1)
    assert planned.needed == estimated.needed == need["process_per_rank"]
    assert gib(planned.needed) in describe_cpu_memory(config, found, 1)


def test_the_end_compares_process_with_process(plan: MemoryPlan, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert plan.found is not None
    line = record_memory(tmp_path, plan, plan.found.needed, torch.device("cpu"))
    assert "predicted for the process" in line and line.endswith("measured (+0.0%)")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["memory"]["predicted"]["process_bytes"] == plan.found.needed
    assert record["decisions"]["norms"] == {"value": "model", "reason": "there is no GPU"}
