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
PART = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two damaged models, and the errors of both ranks."""
    folder = tmp_path_factory.mktemp("shapes")
    make_model(folder / "reshaped")
    tensors = load_file(folder / "reshaped" / "model.safetensors")
    tensors[NAME] = tensors[NAME][:-1].contiguous()
    save_file(tensors, folder / "reshaped" / "model.safetensors", {"format": "pt"})
    make_model(folder / "cut")
    (folder / "cut" / "model.safetensors").rename(folder / "cut" / PART)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, PART)}
    (folder / "cut" / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = (folder / "cut" / PART).read_bytes()
    (folder / "cut" / PART).write_bytes(whole[: len(whole) // 2])
    module, log = "tests.distributed.shapes_case", folder / "log"
    assert run_ranks(2, module, str(folder), env=environment(), log=log, timeout_s=500) == 0, log.read_text()[-3000:]
    return folder


def read_error(folder: Path, name: str) -> str:
    first, second = (json.loads((folder / f"rank{rank}.json").read_text())[name] for rank in (0, 1))
    assert first == second
    return str(first)


def test_every_rank_names_the_weight_of_another_shape(folder: Path) -> None:
    count = len(load_file(folder / "reshaped" / "model.safetensors"))
    line = read_error(folder, "reshaped")
    assert line.startswith(f"base_model={folder / 'reshaped'}: 1 of {count} weights do not match config.json")
    assert f"(first: {NAME} has shape" in line
    assert "(127, 64), config.json says (128, 64))" in line


def test_every_rank_names_the_file_that_is_cut_off(folder: Path) -> None:
    line = read_error(folder, "cut")
    assert f"base_model={folder / 'cut'}: {PART} is truncated" in line
    assert line.endswith("; download or copy it again")


def test_a_model_of_one_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors is truncated.*; download or copy it again"):
        SafetensorsFiles(str(tmp_path), ModelSection())
