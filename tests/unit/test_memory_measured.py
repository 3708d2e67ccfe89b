"""The estimate, made without a GPU, against what 32 runs used on one and 32 on two (docs/lab/memory.md)."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gpu.memory_table import ALLOWED, write_text
from trainer.commands.estimate import build_planner
from trainer.config import load_config
from trainer.memory.planner import Planner, apply_changes

LENGTH, ROWS = 2048, 2
RUNS = json.loads((Path(__file__).parents[2] / "docs/lab/data/memory_h200.json").read_text())
MEASURED = [(run["gpus"], row) for run in RUNS for row in run["rows"]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("measured")
    write_text(folder / "text.jsonl", LENGTH)
    data = {"path": str(folder / "text.jsonl"), "max_length": LENGTH, "packing": True, "cache_dir": str(folder)}
    training = {"batch_size": ROWS, "max_steps": 3, "precision": "bf16"}
    config = {"output_dir": "unset", "lora": {"r": 16, "alpha": 32}, "dataset": data, "training": training}
    (folder / "base.yaml").write_text(yaml.safe_dump(config | {"base_model": "unset"}))
    return {"file": folder / "base.yaml", "planner": cache(partial(plan, folder))}


def plan(folder: Path, shape: str, adapter: str, gpus: int) -> Planner:
    config = load_config(folder / "base.yaml", [f"base_model=random:{shape}", f"adapter={adapter}"]).config
    return build_planner(config, gpus)[0]


@pytest.mark.parametrize(
    ("gpus", "row"), MEASURED, ids=[f"{gpus}-" + "-".join(map(str, list(row.values())[:4])) for gpus, row in MEASURED]
)
def test_the_estimate_is_what_a_card_needed(base: dict[str, Any], gpus: int, row: dict[str, Any]) -> None:
    named = [f"base_model=random:{row['shape']}", f"adapter={row['adapter']}"]
    config = load_config(base["file"], named).config
    changes = {"training.gradient_checkpointing": row["recompute"], "zero.stage": row["stage"]}
    found = base["planner"](row["shape"], row["adapter"], gpus).estimate(apply_changes(config, changes))
    assert ALLOWED[0] <= found.peak / row["measured"] <= ALLOWED[1]
