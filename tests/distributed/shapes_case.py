"""One rank that loads every model in FOLDER module by module and writes its errors to FOLDER/rank<N>.json."""

import json
from pathlib import Path

import torch

from tests.rank_program import join
from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model.base import load_base_model
from trainer.parallel.ranks.group import exit_process, leave_process_group


def loaded(model: Path) -> str:
    """What loading it said."""
    try:
        load_base_model(
            str(model),
            ModelSection(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            attention="eager",
            quantization=QuantizationSection(),
        )
    except UserError as error:
        return str(error)
    return "loaded"


def main() -> None:
    folder, ranks = join(timeout_minutes=2)
    errors = {path.name: loaded(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(errors))
    leave_process_group()


if __name__ == "__main__":
    main()
    exit_process(0)
