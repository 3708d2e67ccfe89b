"""The estimate, made without a GPU, against what 32 runs used on one (docs/memory.md)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gpu.memory_table import ALLOWED, write_text
from trainer.config import load_config
from trainer.estimate import planner_for
from trainer.memory.plan import Planner, with_changes

LENGTH, ROWS = 2048, 2
MEASURED = json.loads((Path(__file__).parents[2] / "docs/data/memory_h200.json").read_text())["rows"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("measured")
    write_text(folder / "text.jsonl", LENGTH)
    data = {"path": str(folder / "text.jsonl"), "max_length": LENGTH, "packing": True, "cache_dir": str(folder)}
    training = {"batch_size": ROWS, "max_steps": 3, "precision": "bf16"}
    config = {"output_dir": "unset", "lora": {"r": 16, "alpha": 32}, "dataset": data, "training": training}
    (folder / "base.yaml").write_text(yaml.safe_dump(config | {"base_model": "unset"}))
    return {"file": folder / "base.yaml", "planner": cache(lambda shape, adapter: plan(folder, shape, adapter))}


def plan(folder: Path, shape: str, adapter: str) -> Planner:
    config = load_config(folder / "base.yaml", [f"base_model=random:{shape}", f"adapter={adapter}"]).config
    return planner_for(config, 1)[0]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, list(row.values())[:4])))
def test_the_estimate_is_what_a_card_needed(base: dict[str, Any], row: dict[str, Any]) -> None:
    named = [f"base_model=random:{row['shape']}", f"adapter={row['adapter']}"]
    config = load_config(base["file"], named).config
    changes = {"training.gradient_checkpointing": row["recompute"], "zero.stage": row["stage"]}
    found = base["planner"](row["shape"], row["adapter"]).of(with_changes(config, changes))
    assert ALLOWED[0] <= found.peak / row["measured"] <= ALLOWED[1]
