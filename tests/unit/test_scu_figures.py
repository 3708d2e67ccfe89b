"""docs/lab/scu.md says nothing of its two experiments but what their published losses give."""

import re
from pathlib import Path

import pytest

from benchmarks.compare.plots import draw_comparison
from tests.bench import scu_figures

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "lab" / "data" / "scu-hold.json.gz"
KL = ROOT / "docs" / "lab" / "data" / "scu-defaults.json.gz"


def held_to_its_data(data: Path, mark: str, least: int, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """A section of the page and what its data print; fails where the page has a figure that they have not."""
    page = (ROOT / "docs" / "lab" / "scu.md").read_text(encoding="utf-8")
    section = page[page.index(f"<!-- {mark} -->") : page.index(f"<!-- end of {mark} -->")]
    scu_figures.show(data)
    printed = capsys.readouterr().out
    figures = set(re.findall(r"\d\.\d{4}", section))
    assert len(figures) > least
    assert figures - set(re.findall(r"\d\.\d{4}", printed)) == set()
    return section, printed


def test_every_figure_of_the_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    section, printed = held_to_its_data(DATA, "hold", 150, capsys)
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| **PI, S = 2 % (the default)**")]
    assert len(rows) == 2
    assert [row[1] for row in rows] == re.findall(r"\| delta-pi-0.02 \| (\d\S+ \[.*?\])", printed)


def test_what_is_said_of_kl_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    held_to_its_data(KL, "defaults", 100, capsys)


def test_the_task_is_drawn_against_forgetting_where_that_was_measured(tmp_path: Path) -> None:
    comparison = scu_figures.read(DATA)["torch"]
    drawn = [path.name for path in draw_comparison(comparison, tmp_path)]
    assert drawn[-1] == "compare_forgetting.png" and (tmp_path / drawn[-1]).stat().st_size > 10_000
