"""Commands of docs/tutorials, with tiny local models in place of those that would be downloaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.mixtures import make_mixture
from tests.pipelines import make_pipeline
from tests.tiny import make_model, make_tokenizer

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


def _make_moe(folder: Path) -> Path:
    make_tokenizer(make_mixture(folder, "qwen3_moe"))
    return folder


# All that differs from the text of a page: a published model -> what makes a tiny one of its kind.
MODELS: dict[str, Callable[[Path], Path]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": make_model,
    "Qwen/Qwen2.5-7B-Instruct": make_model,
    "Qwen/Qwen3-30B-A3B": _make_moe,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": lambda folder: make_pipeline(folder, "sd"),
}


def read_blocks(name: str, models: Path) -> list[str]:
    """Return the bash blocks of a tutorial in order; the models that they name are made in a folder."""
    text = (TUTORIALS / f"{name}.md").read_text()
    for number, (model, make) in enumerate(MODELS.items()):
        if model in text:
            text = text.replace(model, str(make(models / str(number))))
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def last_step(run: Path) -> int:
    """Return the newest step in a run's metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(int(record.get("step", 0)) for record in records)
