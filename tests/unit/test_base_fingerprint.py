"""Identify a base model by the content of its files in any folder, or by its commit on the hub."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.pipelines import make_pipeline
from tests.tiny import make_model
from trainer.checkpoint.base_fingerprint import SAMPLE_INTERVAL, find_changed_part, fingerprint_base, is_same_base
from trainer.checkpoint.identity import Identity, find_differences
from trainer.config import ModelSection

PLAIN = ModelSection()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


def test_a_copy_is_the_same_and_another_is_not(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    first = fingerprint_base(str(model), PLAIN)
    assert set(first) == {"config", "weights"} and is_same_base(first, fingerprint_base(str(copy), PLAIN))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "99"}))
    assert is_same_base(first, fingerprint_base(str(copy), PLAIN))
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0, "rms_norm_eps": 0.1}))
    assert is_same_base(first, fingerprint_base(str(copy), PLAIN)) is False
    other = make_model(tmp_path / "other", seed=3)
    assert is_same_base(first, fingerprint_base(str(other), PLAIN)) is False
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    shutil.copytree(model, tmp_path / "moved")
    save_file(weights, tmp_path / "moved" / "model.safetensors", metadata={"format": "pt"})
    assert is_same_base(first, fingerprint_base(str(tmp_path / "moved"), PLAIN)) is False


def test_a_model_on_the_hub_is_its_commit_until_its_weights_are_here(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--me--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    assert fingerprint_base("me/tiny", PLAIN) == {}
    shutil.copy(model / "config.json", snapshot)
    early = fingerprint_base("me/tiny", PLAIN)
    assert early["commit"] == "a" * 40 and "weights" not in early
    local = fingerprint_base(str(model), PLAIN)
    assert is_same_base(early, local) is None, "nothing to compare by"
    shutil.copy(model / "model.safetensors", snapshot)
    late = fingerprint_base("me/tiny", PLAIN)
    assert is_same_base(early, late) and is_same_base(late, local)
    assert is_same_base(early, early | {"commit": "b" * 40}) is False


def test_16_gb_take_seconds_at_most_and_names_shapes_and_samples_count(tmp_path: Path) -> None:
    """A file with holes stands for a large one: what is read is the same."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((1000).to_bytes(8, "little"))
        stream.truncate(16 * 10**9)
    started = time.process_time()
    first = fingerprint_base(str(tmp_path), PLAIN)
    assert time.process_time() - started < 5.0
    for place in (20, 3 * SAMPLE_INTERVAL + 5, 16 * 10**9 - 1):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        changed = fingerprint_base(str(tmp_path), PLAIN)
        assert is_same_base(first, changed) is False, place
        first = changed
    os.truncate(file, 16 * 10**9 - 1)
    assert is_same_base(first, fingerprint_base(str(tmp_path), PLAIN)) is False


def test_frozen_parts_of_an_image_model_are_compared(tmp_path: Path) -> None:
    origin = make_pipeline(tmp_path / "sd", "sd")
    first = fingerprint_base(str(origin), PLAIN)
    assert {"scheduler", "vae", "text_encoder"} < set(first)
    for part in ("vae", "text_encoder", "scheduler"):
        copy = shutil.copytree(origin, tmp_path / part)
        file = next((copy / part).glob("*config.json"))
        file.write_text(json.dumps(json.loads(file.read_text()) | {"_diffusers_version": "99"}))
        assert is_same_base(first, fingerprint_base(str(copy), PLAIN)), part
        if part == "scheduler":
            file.write_text(json.dumps(json.loads(file.read_text()) | {"prediction_type": "v_prediction"}))
        else:
            (weights,) = (copy / part).glob("*.safetensors")
            save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
        changed = fingerprint_base(str(copy), PLAIN)
        assert is_same_base(first, changed) is False and find_changed_part(first, changed) == part
        then, now = Identity(base=first, base_model="old"), Identity(base=changed, base_model="new")
        [difference] = find_differences(then, now, "run")
        assert difference.problem == f"base_model=new: its {part} differs from old, on which run was trained"
    shutil.rmtree(tmp_path / "vae" / "vae")
    assert is_same_base(first, fingerprint_base(str(tmp_path / "vae"), PLAIN)), "not downloaded yet"
    assert is_same_base(first, {"weights": first["weights"]}), "of an older version, which recorded the denoiser only"


def test_code_of_a_base_is_compared_if_it_is_trusted(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "modeling_mine.py").write_text("SCALE = 1\n")
    trusted = ModelSection(trust_remote_code=True)
    plain, first = (fingerprint_base(str(copy), section) for section in (PLAIN, trusted))
    (copy / "modeling_mine.py").write_text("SCALE = 2\n")
    assert is_same_base(plain, fingerprint_base(str(copy), PLAIN))
    assert find_changed_part(first, fingerprint_base(str(copy), trusted)) == "modeling_mine.py"
    assert is_same_base(first, fingerprint_base(str(copy), trusted)) is False


def test_a_random_model_is_its_name() -> None:
    assert fingerprint_base("random:tiny", PLAIN) == {"name": "random:tiny"}
