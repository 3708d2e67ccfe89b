"""Reference text, on which the adapted model should keep predicting as its base does; all tokens count."""

from pathlib import Path
from typing import Any

from trainer.config import DatasetSection, UserError
from trainer.data.cache import prepare_data
from trainer.data.samples import Samples


def reference_samples(section: DatasetSection, tokenizer: Any, path: str, *, setting: str, seed: int) -> Samples:
    """Return the documents at `path`, read and cached as those of `dataset.path`; `setting` names it in errors.

    Raises UserError if there are none, or if one is longer than `dataset.max_length`: its cut part would be missing.
    """
    alone = DatasetSection(
        path=path, max_length=section.max_length, train_on=("all",), shuffle=False, cache_dir=section.cache_dir
    )
    try:
        prepared = prepare_data(
            alone, tokenizer, seed=seed, cache_dir=Path(section.cache_dir).expanduser(), max_length_of_model=None
        )
    except UserError as error:
        raise UserError(str(error).replace("dataset.path=", f"{setting}=").replace("dataset:", f"{setting}:")) from None
    samples = prepared.train
    assert isinstance(samples, Samples)
    if prepared.stats.truncated:
        raise UserError(
            f"{setting}={path}: {prepared.stats.truncated} of {prepared.stats.documents} texts are longer than "
            f"dataset.max_length={section.max_length}; cut them up, or raise it"
        )
    return samples
