"""`python -m trainer.commands.push RUN REPO`: adapter, tokenizer and a model card to the Hugging Face hub.

Only the files named here leave the machine, and none of them names a folder of it: neither the configuration nor the
logs of the run are uploaded, and of local models and data the card has the last part of the path.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from trainer.checkpoint.checkpoint_files import reseal, step_of
from trainer.checkpoint.finished_run import (
    ADAPTER,
    FinishedRun,
    exit_code_of,
    find_run,
    quiet_libraries,
    saved_tokenizer,
)
from trainer.config import CommandParser, UserError
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.write import summary_rows, values_of

CARD = "README.md"
OURS = "<!-- `zerolora push` writes this card anew; delete this line to keep your own words. -->"
OF_PEFT = "[More Information Needed]"
# What transformers notes of where it loaded a tokenizer from is of no use to others.
OF_THIS_MACHINE = ("is_local", "local_files_only", "name_or_path")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")
LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that may write"


def stage(run: FinishedRun, repo: str, folder: Path) -> list[Path]:
    """Put what is to be uploaded into `folder`, the card also beside the adapter; returns the files, sorted."""
    for name in ADAPTER:
        shutil.copyfile(run.folder / name, folder / name)
    saved_tokenizer(run).save_pretrained(folder)
    base = public_name(run.config.base_model)
    _edit_json(folder / "adapter_config.json", {"base_model_name_or_path": base})
    _edit_json(folder / "tokenizer_config.json", dict.fromkeys(OF_THIS_MACHINE))
    card = run.folder / CARD
    if not _is_own_card(card):
        card.write_text(model_card(run, repo), encoding="utf-8")
        reseal(run.folder, CARD)
    shutil.copyfile(card, folder / CARD)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Set keys of a JSON file, remove those whose value is None."""
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8")) | changes
        kept = {key: value for key, value in content.items() if key not in changes or value is not None}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_own_card(card: Path) -> bool:
    """Whether a person wrote it: neither this command nor PEFT, which leaves a form to fill in."""
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8")
    return OURS not in text and OF_PEFT not in text


def public_name(name: str) -> str:
    """The hub's name of a model or data set, also from a folder of the hub's cache; of other paths the last part."""
    cached = re.search(r"(?:models|datasets)--([^/]+?)--([^/]+)", name)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return name if is_on_hub(name) else Path(name).expanduser().resolve().name


def is_on_hub(name: str) -> bool:
    """Whether a name can only be one of the hub: owner/name, and nothing of the kind on this machine."""
    is_file_name = name.lower().endswith(DATA_FILES)
    return bool(HUB_NAME.fullmatch(name)) and name[0] != "." and not is_file_name and not Path(name).exists()


def model_card(run: FinishedRun, repo: str) -> str:
    """The model card: what it was made of and how, what it measured, how to load it."""
    config = run.config
    base = public_name(config.base_model)
    records = _records(run)
    run_json = run.run_dir / "run.json"
    machine = json.loads(run_json.read_text(encoding="utf-8")) if run_json.is_file() else {}
    groups = dict(summary_rows(records, config.model_dump(mode="json"), machine)) if records else {}
    sources = [source.path for source in config.dataset.mix or (config.dataset,) if source.path]
    held_out = config.dataset.evaluation.path if config.dataset.evaluation else None
    # Rows with a path, or a command line, are written here or not at all.
    about = [row for row in groups.get("Model and data", []) if row[0] not in ("model", "data", "held out")]
    about += [("data", ", ".join(map(public_name, sources)))]
    about += [("held out", public_name(held_out))] if held_out else []
    ran_on = [row for row in groups.get("Ran on", []) if row[0] in ("devices", "versions")]
    parts = [
        _front_matter(config.base_model, base, config.adapter, sources),
        OURS,
        f"# {repo.rpartition('/')[2]}",
        f"A {'QLoRA' if config.adapter == 'qlora' else 'LoRA'} adapter for {_link(base)}, trained with zerolora.",
        *_headline(records, best=config.training.best_checkpoint),
        "## Use",
        _usage(run, repo, base),
        "## Training",
        _table([*about, *groups.get("Training", []), ("seed", str(config.seed))]),
        *(["## Results", _table(groups["Results"])] if "Results" in groups else []),
        *(["## Made with", _table(ran_on)] if ran_on else []),
    ]
    return "\n\n".join(parts) + "\n"


def _records(run: FinishedRun) -> list[Record]:
    """The run's metrics, up to the checkpoint if it is one that is pushed."""
    try:
        records = read_metrics(run.run_dir)
    except UserError:
        return []  # a run without its metrics is pushed without results
    last = step_of(run.folder.resolve()) if run.folder != run.run_dir else None
    return [record for record in records if last is None or (record["step"] or 0) <= last]


def _front_matter(base_model: str, base: str, adapter: str, sources: list[str]) -> str:
    data: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation"}
    # The hub refuses a card that names a model which cannot be one of its own.
    if is_on_hub(base):
        data["base_model"] = base
    datasets = [public_name(source) for source in sources if is_on_hub(source)]
    if datasets:
        data["datasets"] = datasets
    data["tags"] = ["lora", *(["qlora"] if adapter == "qlora" else []), "transformers", "zerolora"]
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _headline(records: list[Record], *, best: bool) -> list[str]:
    losses = values_of(records, "eval/loss")
    if len(losses) < 2:
        return []
    before, after = losses[0], min(losses) if best else losses[-1]
    return [f"Held-out loss **{before:.4f} → {after:.4f}** nats per token ({after / before - 1:+.1%})."]


def _usage(run: FinishedRun, repo: str, base: str) -> str:
    grow = (
        "base.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)  # for the tokens that were added\n"
        if run.config.model.added_tokens
        else ""
    )
    code = (
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
        f'base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")\n'
        f"{grow}"
        f'model = PeftModel.from_pretrained(base, "{repo}")\n'
        "```"
    )
    if run.config.adapter == "qlora":
        code += "\n\nIt was trained on a 4-bit base (below) and fits the full-precision one as well."
    return code


def _link(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if is_on_hub(base) else base


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Create the repository if it is missing and commit `folder` to it; returns its address.

    Raises UserError, without any part of the token, if the hub cannot be reached or refuses.
    """
    if get_token() is None:
        raise UserError(f"{repo}: not logged in to the hub; {LOGIN}")
    disable_progress_bars()
    api = HfApi()
    try:
        # Left alone unless asked for: an existing repository keeps its visibility.
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload adapter with zerolora")
    except OfflineModeIsEnabled:
        raise UserError(f"{repo}: the hub is switched off by HF_HUB_OFFLINE; unset it") from None
    except HfHubHTTPError as error:
        raise UserError(f"{repo}: {_refusal(error.response.status_code)}") from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"{repo}: the hub at {api.endpoint} cannot be reached ({type(error).__name__}); "
            "try where there is a network, or again later"
        ) from None
    return str(created)


def _refusal(status: int) -> str:
    """What the hub's refusal means. Its own words are not repeated: they may quote the request."""
    reasons = {
        401: f"the hub does not accept the token; {LOGIN}",
        403: "the token may not write there; use a name of your own, and a token that may write",
        404: "the hub knows no such user or organisation; check the name before the slash",
    }
    return reasons.get(status, f"the hub refused (HTTP {status}); try again later")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora push", description="Upload adapter, tokenizer and model card to the Hugging Face hub."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of the run, or a checkpoint in it")
    parser.add_argument("repo", metavar="REPO", help="owner/name on the hub; made if it is missing")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument("--dry-run", action="store_true", help="write the card, list the files, use no network")
    parser.add_argument("--base-model", metavar="NAME", help="the base model's name on the hub, if a folder was used")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> None:
    repo = arguments.repo
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(
            f"{repo}: not a name for the hub; use owner/name with letters, digits, '-', '_' and '.', 96 at most"
        ) from None
    run = find_run(arguments.run, arguments.base_model, needs_base=False)
    with tempfile.TemporaryDirectory(prefix="zerolora-push-") as temporary:
        folder = Path(temporary)
        files = stage(run, repo, folder)
        base = public_name(run.config.base_model)
        if not is_on_hub(base):
            print(f"note: {base} is a local model; --base-model owner/name says where others get it", file=sys.stderr)
        if arguments.dry_run:
            for file in files:
                print(f"{file.stat().st_size:>14,}  {file.relative_to(folder)}")
            print(f"card: {run.folder / CARD}; nothing was uploaded")
            return
        print(upload(folder, repo, private=arguments.private))


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    arguments = _parse(argv)
    quiet_libraries()
    return exit_code_of(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
