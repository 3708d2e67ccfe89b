"""The table of docs/reference/models.md: up to date, and measured again for some families of each kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import family_table
from scripts.family_table import COLUMNS, PAGE, page, read

SAMPLE = (
    "aria_text chameleon deepseek_v32 gemma4 glm_moe_dsa gpt2 gpt_oss hrm_text mamba2 minimax_m2 musicgen nemotron_h "
    "qwen3_5 zamba2"
).split()
"""Fused, transposed and shared weights, experts, recurrent layers, indexers, images, and what is refused."""


def measure(kinds: list[str]) -> dict[str, dict[str, str]]:
    """Return the cells of these families, measured by the command in a process of its own."""
    command = [sys.executable, "-m", "scripts.family_table", "--print", *kinds]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))


def list_verdicts(families: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the cells without the reasons, which messages of the product may word differently by now."""
    return {kind: {name: cell.partition(":")[0] for name, cell in cells.items()} for kind, cells in families.items()}


def test_the_page_is_that_of_the_measurements() -> None:
    assert PAGE.read_text() == page(read()), "python -m scripts.family_table --page"


def test_a_new_family_takes_its_place_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_table, "DATA", tmp_path / "families.yaml")
    monkeypatch.setattr(family_table, "PAGE", tmp_path / "models.md")
    cells = dict.fromkeys(COLUMNS, "equal")
    family_table.write({"transformers": "5", "families": {"mixtral": cells, "llama": cells}})
    assert (tmp_path / "models.md").read_text() == page(read())


def test_no_measured_family_differs_or_fails() -> None:
    """Every cell is equal to plain PEFT or refused; `not built` is a family without a tiny configuration."""
    cells = {(kind, name): cell for kind, found in read()["families"].items() for name, cell in found.items()}
    assert cells and {name for _, name in cells} == {*COLUMNS}
    faults = [each for each, cell in cells.items() if cell.partition(":")[0] not in ("equal", "refused", "not built")]
    assert faults == []


def test_a_family_without_a_result_in_time_is_left_for_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(family_table, "DATA", tmp_path / "families.yaml")
    monkeypatch.setattr(family_table, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(family_table, "TIMEOUT_S", 0.0)
    assert family_table.main(["llama"]) == 0
    assert "no result after 0 s" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_some_families_are_measured_as_the_table_says() -> None:
    known = read()["families"]
    assert list_verdicts(measure(SAMPLE)) == list_verdicts({kind: known[kind] for kind in SAMPLE})


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
def test_all_families_are_measured_as_the_table_says() -> None:
    known = read()["families"]
    kinds = [kind for kind in known if kind not in SAMPLE]
    assert list_verdicts(measure(kinds)) == list_verdicts({kind: known[kind] for kind in kinds})
