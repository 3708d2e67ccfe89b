"""Compare every family of models in transformers with plain PEFT: `python -m scripts.family_table [KIND ...]`.

Trains a tiny random model of each family in a process of its own, some seconds each, and writes what it finds to
docs/lab/data/families.yaml and docs/reference/models.md, family by family. Without names it measures the families that
are missing in the file, so the same command continues after an interruption. `--page` only writes the page.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "lab" / "data" / "families.yaml"
PAGE = ROOT / "docs" / "reference" / "models.md"
CPU_S = 400.0
TIMEOUT_S = 3600.0
"""Without a result after so long, as on a machine that is busy with other work, a family is left for another call."""
COLUMNS = {
    "lora": "LoRA",
    "packed": "packed",
    "nf4": "NF4",
    "stage3": "stage 3",
    "merged": "merged",
    "vllm": "vLLM",
}
HEAD = """# Tested models

Written by `python -m scripts.family_table` with transformers {version}. For families of its text and image-text models,
a tiny random model is trained for three steps and compared with plain PEFT in 32 bits: losses and adapter factors, or
all weights after merging.

- **equal**: the same within 1e-6. If rounding in 32 bits is larger, the same within 1e-9 in 64 bits. For
  NF4, which has no 64 bits, this is LoRA, and NF4 is the same within 1e-6 as LoRA on the dequantized weights.
- **refused**: stopped with one message, listed below the table. A pack is refused after a probe has run the model.
- **differs**, **failed**: a known fault. **not built**: no tiny configuration of the family yet.

The columns: LoRA without sharding; packed documents; QLoRA with NF4; ZeRO stage 3 on two ranks; `zerolora merge`; the
adapter exported in vLLM's layout, applied by vLLM's rules. For the checks before training see
[models](../guide/models.md).

"""


def read() -> dict[str, Any]:
    """Return the version of transformers and the cells of each family measured so far."""
    return yaml.safe_load(DATA.read_text()) if DATA.exists() else {"transformers": "", "families": {}}


def write(found: dict[str, Any]) -> None:
    """Write the data file and the page."""
    families = {kind: found["families"][kind] for kind in sorted(found["families"])}
    lines = [f"transformers: {found['transformers']}", "families:"]
    for kind, cells in families.items():
        # One line per family if all of its cells are short.
        lines.append(f"  {kind}: {json.dumps(cells, ensure_ascii=False)}")
    DATA.write_text("\n".join(lines) + "\n")
    PAGE.write_text(page(found | {"families": families}))


def page(found: dict[str, Any]) -> str:
    """Return the page with the table, a list of the reasons, and the counts."""
    families: dict[str, dict[str, str]] = found["families"]
    counts: dict[str, int] = defaultdict(int)
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    rows = []
    for kind, cells in families.items():
        short = {name: cell.partition(":")[0] for name, cell in cells.items()}
        for name, cell in cells.items():
            counts[short[name]] += 1
            if ":" in cell and short[name] != "equal" and kind not in (kinds := reasons[short[name]][shorten(cell)]):
                kinds.append(kind)
        if len(set(short.values())) == 1 and "equal" not in short.values():
            continue  # only in the lists below
        rows.append(f"| {kind} | " + " | ".join(short.get(name, "") for name in COLUMNS) + " |")
    total = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
    lines = [f"{len(families)} families: {total}.", "", "| family | " + " | ".join(COLUMNS.values()) + " |"]
    lines += ["|---" * (len(COLUMNS) + 1) + "|", *rows]
    for name in ("refused", "differs", "failed", "not built"):
        if reasons[name]:
            lines += ["", f"## {name.capitalize()}", ""]
            lines += [f"- {reason}: {', '.join(kinds)}" for reason, kinds in sorted(reasons[name].items())]
    return HEAD.format(version=found["transformers"]) + "\n".join(lines) + "\n"


def shorten(cell: str) -> str:
    """Return the reason of a cell without names of classes and model types, so that families share it."""
    text = cell.partition(": ")[2]
    text = re.sub(r"\b[A-Z]\w+(?:For\w+|LMHeadModel\w*|LMHead)\b", "the model", text)
    text = re.sub(r"\(([a-z][\w-]+)\)(?=[;,])", "", text).replace(" ;", ";").replace(" ,", ",")
    text = re.sub(r"model_type [\w-]+", "this model_type", text)
    return re.sub(r"[<>|]", "", text)


def measure(kind: str) -> dict[str, str]:
    """Return the cells of a family, measured in a fork of this process."""
    from tests import family_cells

    with tempfile.TemporaryDirectory() as folder:
        cells = family_cells.run_forked(partial(family_cells.measure, Path(folder), kind), TIMEOUT_S, CPU_S)
        cells = cells if isinstance(cells, dict) else dict.fromkeys(COLUMNS, cells)
        return {name: cell.replace(f"{folder}/", "").replace(folder, "") for name, cell in cells.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure families in forks of this process, which has imported all libraries."""
    parser = argparse.ArgumentParser(prog="python -m scripts.family_table", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model types; those missing in the file if none")
    parser.add_argument("--page", action="store_true", help="only write the page from the file")
    parser.add_argument("--print", action="store_true", help="only print the results")
    arguments = parser.parse_args(argv)
    if arguments.page:
        write(read())
        return 0
    import transformers

    from tests.families import all_kinds
    from tests.family_cells import NO_RESULT

    for kind in arguments.kinds or [kind for kind in all_kinds() if kind not in read()["families"]]:
        cells = measure(kind)
        print(json.dumps([kind, cells]), flush=True)
        is_over = any(cell.startswith(NO_RESULT) for cell in cells.values())
        if not arguments.print and not is_over:
            found = read() | {"transformers": transformers.__version__}
            found["families"][kind] = cells
            write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
