"""Write an adapter's model card, at the end of training and in `zerolora push`.

Cards are uploaded, so they contain no path outside the run's working directory. Other local models and data
are shown by the last part of their path. The example code in a run's card runs as is.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from trainer.monitor.metrics import Record
from trainer.monitor.report.charts import render_template
from trainer.monitor.report.curves import HeldOutLosses, detect_batch_unit, extract_scores
from trainer.monitor.report.recorded import read_run, shorten_cache_path
from trainer.monitor.report.write import build_summary_tables

CARD = "README.md"
MARKER = "<!-- zerolora overwrites this card; delete this line to keep your changes. -->"
OLD_MARKER = "<!-- zerolora writes this card anew; delete this line to keep your own words. -->"
PEFT_PLACEHOLDER = "[More Information Needed]"
BAR_WIDTH = 40
"""Length in characters of the bar for a score of 1."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")


def is_user_written_card(card: Path) -> bool:
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace")
    return not any(marker in text for marker in (MARKER, OLD_MARKER, PEFT_PLACEHOLDER))


def get_public_name(name: str) -> str:
    """Return a model's or dataset's Hub ID (also for a path in the Hub's cache), or the last part of a local path."""
    short = shorten_cache_path(name)
    return short if short != name or is_on_hub(name) else Path(name).expanduser().resolve().name


def is_on_hub(name: str) -> bool:
    """Return whether a name refers to the Hub: it has the form owner/name and is not a local path."""
    is_file_name = name.lower().endswith(DATA_SUFFIXES)
    return bool(HUB_NAME.fullmatch(name)) and name[0] != "." and not is_file_name and not Path(name).exists()


def format_python_path(name: str, *, is_uploaded: bool = False) -> str:
    """Return the Python expression to pass to `from_pretrained` for a model or adapter.

    Paths in the working or home directory become relative to it. Other paths, and all paths in uploaded cards,
    are replaced with a placeholder.
    """
    if is_on_hub(get_public_name(name)):
        return f'"{get_public_name(name)}"'
    path = Path(name).expanduser().resolve()
    if not is_uploaded and path.is_relative_to(Path.cwd()):
        return f'"./{path.relative_to(Path.cwd())}"'
    if not is_uploaded and path.is_relative_to(Path.home()):
        return f'os.path.expanduser("~/{path.relative_to(Path.home())}")'
    return f'"path/to/{path.name}"'


def build_model_card(
    settings: dict[str, Any], run_dir: Path, records: list[Record], *, name: str, auto_class: str, pipeline_tag: str
) -> str:
    """Build the text of the card: base model, data, training settings, results, and how to load the adapter.

    `settings` is the run's configuration as JSON, `name` the adapter's repository (owner/name) or the absolute path of
    its folder, `auto_class` the transformers class that loads the model, `pipeline_tag` its task on the Hub.
    """
    base, data = get_public_name(settings["base_model"]), settings["dataset"]
    groups = dict(build_summary_tables(records, settings, read_run(run_dir))) if records else {}
    sources = [source["path"] for source in data["mix"] or (data,) if source["path"]]
    held_out = data["evaluation"]["path"] if data["evaluation"] else None
    # Rewrite or omit rows that contain a path or command line.
    about = [row for row in groups.get("Model and data", []) if row[0] not in ("model", "data", "held out")]
    about += [("data", ", ".join(map(get_public_name, sources)))]
    about += [("held out", get_public_name(held_out))] if held_out else []
    ran_on = [row for row in groups.get("Ran on", []) if row[0] in ("devices", "versions")]
    is_uploaded = not Path(name).is_absolute()
    return render_template(
        "card.md.jinja",
        front=_build_front_matter(settings["adapter"], base, sources, pipeline_tag),
        marker=MARKER,
        title=name.rpartition("/")[2],
        kind="QLoRA" if settings["adapter"] == "qlora" else "LoRA",
        base=f"[{base}](https://huggingface.co/{base})" if is_on_hub(base) else base,
        held_out=HeldOutLosses.from_records(records),
        unit=detect_batch_unit(records).loss,
        config=settings,
        has_score=auto_class.endswith("SequenceClassification"),
        auto=auto_class,
        adapter=f'"{name}"' if is_uploaded else format_python_path(name),
        base_path=format_python_path(settings["base_model"], is_uploaded=is_uploaded),
        tables=[
            ("Training", [*about, *groups.get("Training", []), ("seed", str(settings["seed"]))]),
            ("Results", groups.get("Results", [])),
            ("Environment", ran_on),
        ],
        scores=_format_score_bars(records),
    )


def _format_score_bars(records: list[Record]) -> list[str]:
    lines = []
    for name, (base, scores) in extract_scores(records).items():
        values = {"base": base, "adapter": float(scores.values[-1])}
        if all(0 <= value <= 1 for value in values.values()):
            bars = [(kind, "█" * round(BAR_WIDTH * value), value) for kind, value in values.items()]
            lines += [name, *(f"  {kind:<8}{bar:<{BAR_WIDTH}} {value:.4f}" for kind, bar, value in bars)]
    return lines


def _build_front_matter(adapter: str, base: str, sources: list[str], pipeline_tag: str) -> str:
    data: dict[str, Any] = {"library_name": "peft", "pipeline_tag": pipeline_tag}
    # The Hub rejects a card with a local base model.
    if is_on_hub(base):
        data["base_model"] = base
    if datasets := [get_public_name(source) for source in sources if is_on_hub(source)]:
        data["datasets"] = datasets
    data["tags"] = ["lora", *(["qlora"] if adapter == "qlora" else []), "transformers", "zerolora"]
    return yaml.safe_dump(data, sort_keys=False)
