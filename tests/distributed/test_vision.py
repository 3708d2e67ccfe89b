"""Models of text and images on two ranks, which often have images at different times: the losses of plain PEFT."""

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.vision import (
    NO_VISION,
    PROCESSORS,
    WITH_TORCHVISION,
    make_vision_model,
    plain_vision_losses,
    store_dequantised_vision,
    write_vision_chats,
)
from trainer.config import load_config

pytestmark = pytest.mark.distributed

FAMILIES = ("qwen2_5_vl", "gemma3")
COMMON: dict[str, Any] = {
    "ops__backend": "reference", "training__learning_rate": 1e-2, "training__batch_size": 1, "dataset__max_length": 192,
    "dataset__path": "chats.jsonl", "dataset__evaluation__path": "held/chats.jsonl", "training__max_steps": 3,
}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "stage2": {"zero__stage": 2},
    "stage3": {"zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
    "module": {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
}
PACKED = {"packed3": {"zero__stage": 3, "dataset__packing": True}}
CACHED: dict[str, dict[str, Any]] = {
    f"cached-{name}": {**PLACES[name], "vision__cache": True, "dataset__cache_dir": f"cache-{name}"}
    for name in ("stage3", "module")
}
TRAINED: dict[str, dict[str, Any]] = {
    f"{train}-{name}": {**PLACES[name], "vision__train": train}
    for train, name in (("lora", "stage2"), ("lora", "stage3"), ("projector", "stage3"), ("projector", "module"))
}
NF4 = {f"nf4-{stage}": {"zero__stage": stage, "adapter": "qlora"} for stage in (2, 3)}


OTHERS = [
    pytest.param(
        family, marks=pytest.mark.skipif(family in WITH_TORCHVISION and not find_spec("torchvision"), reason=NO_VISION)
    )
    for family in PROCESSORS
    if family not in FAMILIES
]
STAGES = {name: PLACES[name] for name in ("stage2", "stage3")} | PACKED | NF4


def plan(*families: str, changes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        case(f"{family}-{name}", base_model=f"{family}-model", **COMMON, **own)
        for family in families
        for name, own in changes.items()
    ]


def run_all(folder: Path, *families: str, changes: dict[str, dict[str, Any]]) -> Matrix:
    """Train each of the families with each of the settings on two ranks."""
    for family in families:
        (folder / f"{family}-model").mkdir()
        make_vision_model(folder / f"{family}-model", family)
        if changes.keys() & NF4.keys():
            store_dequantised_vision(folder / f"{family}-model", folder / f"{family}-nf4-model")
    write_vision_chats(folder, 12, text_only=0.5)
    (folder / "held").mkdir()
    write_vision_chats(folder / "held", 3, seed=1, text_only=0.5)
    cases = plan(*families, changes=changes)
    launch(folder, 2, cases, environment())
    return Matrix(folder, cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    changes = PLACES | PACKED | NF4 | CACHED | TRAINED
    return run_all(tmp_path_factory.mktemp("vision"), *FAMILIES, changes=changes)


def expected(runs: Matrix, name: str) -> list[float]:
    """The losses of plain PEFT for the settings of a run; those of NF4 on the same values in 32 bits."""
    family, _, cell = name.partition("-")
    settings = (PLACES | PACKED | NF4 | CACHED | TRAINED)[cell].copy()
    if settings.pop("adapter", "lora") == "qlora":
        settings["base_model"] = f"{family}-nf4-model"
    overrides = case(name, **{"base_model": f"{family}-model"} | COMMON | settings)["overrides"]
    folder = runs[name].folder.parent
    paths = {"base_model", "dataset.path", "dataset.evaluation.path"}
    given = [f"{key}={folder / value if key in paths else value}" for key, value in overrides.items()]
    return plain_vision_losses(
        load_config(folder / "base.yaml", [*given, f"output_dir={folder / 'plain'}"]).config, ranks=2
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first", "names"), [("stage2", PLACES | CACHED), ("packed3", PACKED)])
def test_losses_are_those_of_plain_peft_at_every_stage(
    family: str, first: str, names: dict[str, Any], runs: Matrix
) -> None:
    wanted = expected(runs, f"{family}-{first}")
    for name in names:
        assert runs[f"{family}-{name}"].losses == pytest.approx(wanted, rel=1e-5), name
        held_out = [runs[f"{family}-{each}"].records("eval/loss") for each in (first, name)]
        assert held_out[1] == pytest.approx(held_out[0], rel=1e-5), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train", ["lora", "projector"])
def test_towers_and_projectors_train_as_in_plain_peft(family: str, train: str, runs: Matrix) -> None:
    wanted = expected(runs, f"{family}-{train}-stage3")
    assert wanted != pytest.approx(runs[f"{family}-stage3"].losses, rel=1e-5)
    for name in (each for each in TRAINED if each.startswith(train)):
        assert runs[f"{family}-{name}"].losses == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("gather", ["stage3", "module"])
def test_no_random_mixture_of_texts_and_images_hangs_at_stage_3(gather: str, tmp_path: Path) -> None:
    """ZEROLORA_MIXTURE_STEPS steps, by default 10,000; a rank often has images when the other one has none."""
    steps = int(os.environ.get("ZEROLORA_MIXTURE_STEPS", "10000"))
    (tmp_path / "images").mkdir()
    make_vision_model(tmp_path / "images", "qwen2_5_vl", num_hidden_layers=2)
    write_vision_chats(tmp_path, 61, text_only=0.5)
    (tmp_path / "held").mkdir()
    write_vision_chats(tmp_path / "held", 3, seed=1)
    runs = [
        case(
            "mixture", base_model="images", **PLACES[gather], vision__train="lora", training__save_steps=0,
            **COMMON | {"training__max_steps": steps, "training__learning_rate": 1e-4},
        )
    ]  # fmt: skip
    launch(tmp_path, 2, runs, environment(), timeout_s=3 * 3600)
    losses = Matrix(tmp_path, runs)["mixture"].losses
    assert len(losses) == steps and all(map(math.isfinite, losses))
    assert len({round(loss, 5) for loss in losses[-61:]}) > 20, "mixtures that differ"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_in_four_bits_trains_alike_at_every_stage(family: str, runs: Matrix) -> None:
    wanted = expected(runs, f"{family}-nf4-2")
    assert wanted != pytest.approx(runs[f"{family}-stage2"].losses, rel=1e-4)
    for name in NF4:
        assert runs[f"{family}-{name}"].losses == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.nightly
@pytest.mark.parametrize("family", OTHERS)
def test_every_family_has_the_losses_of_plain_peft_at_stages_2_and_3(family: str, tmp_path: Path) -> None:
    without = NF4 if family == "lfm2_vl" else {}  # which refuses NF4
    changes = {name: change for name, change in STAGES.items() if name not in without}
    runs = run_all(tmp_path, family, changes=changes)
    own: tuple[str, ...] = ("stage2", "packed3", "nf4-2")
    wanted = {name: expected(runs, f"{family}-{name}") for name in own if name in changes}
    for name in changes:
        like = "nf4-2" if name in NF4 else {"stage3": "stage2"}.get(name, name)
        assert runs[f"{family}-{name}"].losses == pytest.approx(wanted[like], rel=1e-5), name
