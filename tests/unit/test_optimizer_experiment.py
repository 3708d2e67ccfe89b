"""The table of docs/lab/optimizers.md: rates, intervals, and a page that is that of its data."""

from typing import Any

import pytest

from tests.bench.optimizer_experiment import (
    DATA,
    NOTE,
    RATES,
    best_rate,
    by_rate,
    rate_beyond,
    replace_optimizers,
    settings,
    spread,
    table,
    verdict,
    write_note,
)  # fmt: skip
from trainer.config import OPTIMIZERS, RunConfig


def measured(losses: dict[tuple[str, float], list[float]]) -> dict[str, Any]:
    runs = [
        {"optimizer": name, "rate": rate, "seed": seed, "loss": loss}
        for (name, rate), found in losses.items()
        for seed, loss in enumerate(found, 1)
    ]
    return {"seeds": [1, 2, 3], "times": {"lion": {"step_ms": 25.0}}, "runs": runs}


FOUND = measured(
    {
        ("adamw", 3e-4): [1.3, 1.2, 1.4], ("adamw", 1e-3): [1.0, 1.1, 1.2], ("adamw", 3e-3): [1.5, 1.5, 1.5],
        ("lion", 3e-5): [1.4, 1.4, 1.4], ("lion", 1e-4): [1.1, 1.2, 1.3], ("lion", 3e-4): [0.9, 1.0],
    }
)  # fmt: skip


def test_intervals_are_students() -> None:
    mean, half = spread([1.0, 2.0, 3.0])
    assert (mean, half) == pytest.approx((2.0, 4.3027 / 3**0.5), rel=1e-4)


def test_a_rate_counts_once_all_seeds_are_there() -> None:
    assert list(by_rate(FOUND, "lion")) == [3e-5, 1e-4] and best_rate(FOUND, "adamw") == 1e-3


def test_a_run_of_some_optimizers_replaces_theirs() -> None:
    about = {"steps": 100, "machine": "one", "commit": "a1"}
    added = about | measured({("lion", 1e-4): [0.5] * 3}) | {"times": {"lion": {"step_ms": 9.0}}, "commit": "b2"}
    found = replace_optimizers(about | FOUND, added)
    assert list(by_rate(found, "adamw")) == [3e-4, 1e-3, 3e-3]
    assert by_rate(found, "lion") == {1e-4: {1: 0.5, 2: 0.5, 3: 0.5}}
    assert found["times"]["lion"]["step_ms"] == 9.0 and found["machine"] == "one; lion: one, commit b2"
    with pytest.raises(SystemExit, match="50 steps"):
        replace_optimizers(about | FOUND, added | {"steps": 50})


@pytest.mark.parametrize(
    ("best", "beyond"), [([3, 2, 1], 1e-2), ([1, 2, 3], 1e-4), ([2, 1, 2], None)], ids=["high", "low", "inside"]
)
def test_the_grid_grows_beyond_its_ends(best: list[float], beyond: float | None) -> None:
    losses = {("adamw", rate): [loss] * 3 for rate, loss in zip((3e-4, 1e-3, 3e-3), best, strict=True)}
    assert rate_beyond(measured(losses), "adamw") == (pytest.approx(beyond) if beyond else None)


def test_a_row_is_paired_by_seed_with_adamw() -> None:
    [row] = [line for line in table(FOUND).splitlines() if line.startswith("| `lion`")]
    assert "| 0.0001 (edge) | 1.2000 ± 0.2484 | +0.1000 ± 0.0000 | 25.0 |" in row


def test_a_difference_counts_beyond_its_interval() -> None:
    assert verdict(FOUND) == "A higher one: `lion`."


def test_every_optimizer_is_one_of_ours_and_its_settings_are_valid() -> None:
    assert RATES.keys() <= OPTIMIZERS.keys()
    for name, rates in RATES.items():
        nested: dict[str, Any] = {}
        for key, value in settings(DATA.parent, DATA.parent, name, rates[0], 1, 10).items():
            *path, last = key.split(".")
            inner = nested
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        assert RunConfig.model_validate(nested | {"output_dir": "run"}).training.optimizer == name


def test_the_page_is_that_of_the_data() -> None:
    assert DATA.exists() == NOTE.exists()
    assert not DATA.exists() or NOTE.read_text() == write_note(), "python -m tests.bench.optimizer_experiment note"
