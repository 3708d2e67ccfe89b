"""Save the adapter of a model in memory, as a run does."""

from pathlib import Path
from typing import Any

from trainer.checkpoint.adapter_files import AdapterFormat
from trainer.checkpoint.weights import gather_weights, write_adapter


def save_adapter(model: Any, folder: Path, *, require_nonzero_b: bool = True, initial: Path | None = None) -> None:
    """Write the adapter in PEFT's format and verify it."""
    trained = gather_weights(model)
    form = AdapterFormat.from_model(model, trained)
    write_adapter(form, trained, folder, require_nonzero_b=require_nonzero_b, initial=initial)
