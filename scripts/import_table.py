"""Import every file of some folders and count the results: `python -m scripts.import_table FOLDER ...`.

Only files that train LoRA or QLoRA adapters count (`--all`: full fine-tuning too). Prints `imported` or the first
mistake for each file; `--markdown` as a table.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from launcher.importing.command import translate_arguments
from trainer.config import UserError


def main() -> int:
    """Print a line for each file, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="full fine-tuning too")
    parser.add_argument("--dataset-dir", type=Path, help="the folder of LLaMA-Factory's dataset_info.json")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    rows = []
    for folder in arguments.folders:
        for file in sorted(path for path in folder.rglob("*") if path.suffix in (".yml", ".yaml")):
            tree = _tree(file)
            if not _trains_an_adapter(tree) and not (arguments.all and _trains(tree)):
                continue
            result = outcome(file, arguments.dataset_dir if "finetuning_type" in tree else None)
            kind = "imported" if result == "imported" else "refused"
            counts[kind] += 1
            rows.append((str(file.relative_to(folder.parent)), result))
    width = max((len(name) for name, _ in rows), default=0)
    for name, result in rows:
        print(f"| {name} | {result} |" if arguments.markdown else f"{name:<{width}}  {result}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)
    return 0


def outcome(file: Path, dataset_dir: Path | None) -> str:
    """Return `imported`, or the first mistake."""
    try:
        translate_arguments([str(file)], dataset_dir)
    except UserError as error:
        return str(error).partition("\n")[0].removeprefix(f"{file}:").strip()
    return "imported"


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _trains_an_adapter(tree: dict[str, Any]) -> bool:
    if "export_dir" in tree or tree.get("do_predict") or "infer_backend" in tree:
        return False
    peft = tree.get("peft_config")
    if isinstance(peft, dict):
        return peft.get("name") == "lora" and "train_dataset" in tree
    return tree.get("adapter") in ("lora", "qlora") or (tree.get("finetuning_type") == "lora" and "stage" in tree)


def _trains(tree: dict[str, Any]) -> bool:
    return any(name in tree for name in ("datasets", "pretraining_dataset", "train_dataset")) or (
        "finetuning_type" in tree and "dataset" in tree
    )


if __name__ == "__main__":
    sys.exit(main())
