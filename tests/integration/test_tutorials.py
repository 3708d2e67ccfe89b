"""docs/tutorials: the commands of each page run as written, in order, in an empty folder."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import environment
from tests.mixtures import make_mixture
from tests.tiny import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
PATIENCE_S = 240

# All that differs from the text of a page: models that would be downloaded -> the kind of a tiny local one.
MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
    "Qwen/Qwen2.5-7B-Instruct": "llama",
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
}
# What each page must leave behind: the run's folder, its steps, and the files of the last command.
RESULTS = {
    "first-run": ("runs/my", 20, "merged/model.safetensors"),
    "your-data": ("runs/faq", 10, "runs/faq/report.html"),
    "qlora": ("runs/qlora", 6, "merged/model.safetensors"),
    "moe": ("runs/moe", 6, "runs/moe/adapter_model.safetensors"),
}


def read_commands(page: Path) -> str:
    """Return the fenced bash blocks of a page as one script."""
    return "".join(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


def make_local(kind: str, folder: Path) -> Path:
    """Make the tiny model that stands for a published one."""
    if kind == "llama":
        return make_model(folder)
    make_tokenizer(make_mixture(folder, kind))
    return folder


def test_every_tutorial_is_run() -> None:
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(RESULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_commands_of_a_tutorial_work_in_order(name: str, tmp_path: Path) -> None:
    script = "set -ex\n" + read_commands(TUTORIALS / f"{name}.md")
    for model, kind in MODELS.items():
        if model in script:
            script = script.replace(model, str(make_local(kind, tmp_path / "models" / kind)))
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    run, steps, file = RESULTS[name]
    records = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("step", 0) for record in records) == steps
    assert (folder / file).stat().st_size > 0
