"""The model card of an adapter, written at the end of training and by `zerolora push`.

Cards are uploaded, so no card names a folder outside of the directory in which training was started: other local
models and data appear with the last part of their path. The code of a card in a run's folder runs as is.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from trainer.config import RunConfig
from trainer.monitor.metrics import Record
from trainer.monitor.report.curves import HeldOut, find_unit
from trainer.monitor.report.recorded import hub_name, read_run
from trainer.monitor.report.write import summary_rows

CARD = "README.md"
OURS = "<!-- zerolora writes this card anew; delete this line to keep your own words. -->"
PEFT_PLACEHOLDER = "[More Information Needed]"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")


def is_own_card(card: Path) -> bool:
    """Return whether a user wrote the card, rather than zerolora or PEFT, which leaves a form to fill in."""
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace")
    return OURS not in text and PEFT_PLACEHOLDER not in text


def public_name(name: str) -> str:
    """Return the hub name of a model or dataset, also for a folder in the hub's cache, or the last part of a path."""
    short = hub_name(name)
    return short if short != name or is_on_hub(name) else Path(name).expanduser().resolve().name


def is_on_hub(name: str) -> bool:
    """Return whether a name can only be on the hub: it has the form owner/name, and no such path exists locally."""
    is_file_name = name.lower().endswith(DATA_FILES)
    return bool(HUB_NAME.fullmatch(name)) and name[0] != "." and not is_file_name and not Path(name).exists()


def python_path(name: str, *, uploaded: bool = False) -> str:
    """Return the Python expression to pass to `from_pretrained` for a model or adapter.

    Paths below the working directory or the home directory are written relative to it. Other paths, and every path in
    an uploaded card, become a placeholder.
    """
    if is_on_hub(public_name(name)):
        return f'"{public_name(name)}"'
    path = Path(name).expanduser().resolve()
    if not uploaded and path.is_relative_to(Path.cwd()):
        return f'"./{path.relative_to(Path.cwd())}"'
    if not uploaded and path.is_relative_to(Path.home()):
        return f'os.path.expanduser("~/{path.relative_to(Path.home())}")'
    return f'"path/to/{path.name}"'


def model_card(config: RunConfig, run_dir: Path, records: list[Record], *, name: str) -> str:
    """Return the text of the card: base model, data, training settings, results, and how to load the adapter.

    `name` is the adapter's repository (owner/name) or the absolute path of its folder.
    """
    base = public_name(config.base_model)
    groups = dict(summary_rows(records, config.model_dump(mode="json"), read_run(run_dir))) if records else {}
    sources = [source.path for source in config.dataset.mix or (config.dataset,) if source.path]
    held_out = config.dataset.evaluation.path if config.dataset.evaluation else None
    # Rows that contain a path or a command line are rewritten here or left out.
    about = [row for row in groups.get("Model and data", []) if row[0] not in ("model", "data", "held out")]
    about += [("data", ", ".join(map(public_name, sources)))]
    about += [("held out", public_name(held_out))] if held_out else []
    ran_on = [row for row in groups.get("Ran on", []) if row[0] in ("devices", "versions")]
    parts = [
        _front_matter(config, base, sources),
        OURS,
        f"# {name.rpartition('/')[2]}",
        f"A {'QLoRA' if config.adapter == 'qlora' else 'LoRA'} adapter for {_link(base)}, trained with zerolora.",
        *_headline(records),
        "## Use",
        _usage(config, name),
        "## Training",
        _table([*about, *groups.get("Training", []), ("seed", str(config.seed))]),
        *(["## Results", _table(groups["Results"])] if "Results" in groups else []),
        *(["## Made with", _table(ran_on)] if ran_on else []),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(config: RunConfig, base: str, sources: list[str]) -> str:
    kind = "text-classification" if config.task == "reward" else "text-generation"
    data: dict[str, Any] = {"library_name": "peft", "pipeline_tag": kind}
    # The hub rejects a card with a base model that cannot be on the hub.
    if is_on_hub(base):
        data["base_model"] = base
    datasets = [public_name(source) for source in sources if is_on_hub(source)]
    if datasets:
        data["datasets"] = datasets
    data["tags"] = ["lora", *(["qlora"] if config.adapter == "qlora" else []), "transformers", "zerolora"]
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _headline(records: list[Record]) -> list[str]:
    held_out = HeldOut.from_records(records)
    if held_out is None:
        return []
    before, after = held_out.before, held_out.after
    return [f"Held-out loss **{before:.4f} → {after:.4f}** {find_unit(records).loss} ({after / before - 1:+.1%})."]


def _usage(config: RunConfig, name: str) -> str:
    grow = (
        "base.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)  # for the tokens that were added\n"
        if config.model.added_tokens
        else ""
    )
    is_reward = config.task == "reward"
    auto = "AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM"
    uploaded = not Path(name).is_absolute()
    adapter = f'"{name}"' if uploaded else python_path(name)
    base = python_path(config.base_model, uploaded=uploaded)
    code = (
        "```python\n" + "import os\n\n" * ("os." in adapter + base) + "from peft import PeftModel\n"
        f"from transformers import {auto}, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({adapter})\n"
        f'base = {auto}.from_pretrained({base}, {"num_labels=1, " * is_reward}dtype="auto")\n'
        f"{grow}"
        + "base.config.pad_token_id = tokenizer.pad_token_id\n"
        * is_reward
        + f"model = PeftModel.from_pretrained(base, {adapter})\n"
        "```"
    )
    if config.adapter == "qlora":
        code += "\n\nIt was trained on a quantised base (below) and fits the full-precision one as well."
    if config.lora.dora:
        code += (
            "\n\nThis is a DoRA adapter. Load it with `PeftModel` as above: `AutoModelForCausalLM.from_pretrained` on "
            "the adapter's folder leaves out its magnitudes, and the answers are wrong."
        )
    return code


def _link(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if is_on_hub(base) else base


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])
