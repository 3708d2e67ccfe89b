"""A checkpoint that does not fit its config.json is refused by every rank before any weight is loaded."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.distributed.conftest import environment, run_ranks
from tests.tiny import make_model
from trainer.config import ModelSection, UserError
from trainer.model.tensor_files import SafetensorsFiles

pytestmark = pytest.mark.distributed
NAME = "model.layers.1.mlp.up_proj.weight"


def told(folder: Path) -> list[str]:
    module, log = "tests.distributed.shapes_case", folder / "log"
    assert run_ranks(2, module, str(folder), env=environment(), log=log, timeout_s=500) == 0, log.read_text()[-3000:]
    return [(folder / f"rank{rank}.txt").read_text() for rank in (0, 1)]


def test_every_rank_names_the_weight_of_another_shape(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    shape = tuple(tensors[NAME].shape)
    tensors[NAME] = tensors[NAME][:-1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    first, second = told(tmp_path)
    assert first == second
    assert first.startswith(f"base_model={tmp_path / 'model'}: 1 of {len(tensors)} weights do not fit config.json")
    assert f"(first: {NAME} has shape" in first
    assert f"{(shape[0] - 1, shape[1])}, config.json says {shape})" in first


def test_every_rank_names_the_file_that_is_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = (folder / "model-00001-of-00001.safetensors").read_bytes()
    (folder / "model-00001-of-00001.safetensors").write_bytes(whole[: len(whole) // 2])
    first, second = told(tmp_path)
    assert first == second
    assert f"base_model={folder}: model-00001-of-00001.safetensors cannot be read (" in first
    assert first.endswith("; download or copy it again")


def test_a_model_of_one_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read \(.*\); download or copy it again"):
        SafetensorsFiles(str(tmp_path), ModelSection())
