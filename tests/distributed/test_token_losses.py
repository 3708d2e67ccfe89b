"""Losses and weights of tokens in whole runs on two ranks: those of plain PEFT with the published formulas."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.plain_peft import plain_losses
from tests.tiny import WORDS, write_chats
from tests.token_losses import PUBLISHED, SETTINGS
from trainer.config import RunConfig, load_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RELATIVE = 1e-4
RECOMPUTED: dict[str, Any] = {"training__gradient_checkpointing": "non_reentrant"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}-2": (name, {"zero__stage": 2}) for name in PUBLISHED},
    **{f"dft-{stage}": ("dft", {"zero__stage": stage}) for stage in (0, 1)},
    "dft-module": ("dft", {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0}),
    "focal-3": ("focal", {"zero__stage": 3, **RECOMPUTED}),
    "eaft-packed": ("eaft", {"zero__stage": 3, "dataset__packing": True}),
    "smoothed-packed": ("label_smoothing", {"zero__stage": 2, "dataset__packing": True, **RECOMPUTED}),
    "dft-streamed": ("dft", {"zero__stage": 2, "dataset__streaming": True, "dataset__shuffle": False}),
}
KL: dict[str, Any] = {
    **SETTINGS["dft"],
    "zero__stage": 2,
    "dataset__packing": True,
    "training__learning_rate": 1e-2,
    "scu__enabled": True,
    "scu__measure": "kl",
    "scu__target": 0.0005,
    "scu__reference_share": 0.5,
}
NOISY = {
    "zero__stage": 2,
    "training__neftune_noise_alpha": 5.0,
    "training__max_steps": 6,
    "training__save_steps": 3,
}


def write_weighted(path: Path, count: int) -> None:
    """Conversations of two answers, of which some weigh less than others."""
    draw = random.Random(3)
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(2):
                words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 5)))
                weight = draw.choice([0, 0.1, 0.5, 1])
                messages += [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
                messages[-1]["weight"] = weight  # type: ignore[assignment]
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("losses")
    write_weighted(folder / "weighted.jsonl", 40)
    data = {"dataset__path": str(folder / "weighted.jsonl")}
    cases = [case(name, **data, **SETTINGS[loss], **way) for name, (loss, way) in WAYS.items()]
    write_chats(folder / "reference.jsonl", 9, seed=4)
    kl = data | KL | {"scu__reference": str(folder / "reference.jsonl")}
    cases.append(case("kl", **kl))
    cases.append(case("untrained", training__learning_rate=1e-9, **SETTINGS["dft"], **data))
    cases.append(case("untrained-nll", training__learning_rate=1e-9))
    cases.append(case("noisy", **NOISY))
    again = {"training__resume_from_checkpoint": "noisy/checkpoint-3", "output_dir": "noisy-again"}
    cases.append(case("noisy-again", **NOISY, **again))
    cases.append(case("quiet", **NOISY | {"training__neftune_noise_alpha": 0.0}))
    launch(folder, 2, cases, environment())
    return Matrix(folder, cases)


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_plain_peft_with_the_published_formula(runs: Matrix, name: str) -> None:
    loss, way = WAYS[name]
    folder = runs["nll-2"].folder.parent
    packed = ["dataset.packing=true"] if way.get("dataset__packing") else []
    in_order = ["dataset.shuffle=false"] if way.get("dataset__streaming") else []
    overrides = [f"dataset.path={folder}/weighted.jsonl", *packed, *in_order]
    config: RunConfig = load_config(folder / "base.yaml", overrides).config
    plain = plain_losses(config, ranks=2, device=torch.device("cpu"), token_losses=PUBLISHED[loss])
    assert runs[name].losses == pytest.approx(plain, rel=RELATIVE)


def test_held_out_losses_compare_whatever_is_trained(runs: Matrix) -> None:
    assert runs["untrained"].losses[0] < 0.1 * runs["untrained-nll"].losses[0]
    before, plain = (runs[name].records("eval/loss") for name in ("untrained", "untrained-nll"))
    assert before and before == pytest.approx(plain, rel=1e-6)


def test_reference_text_does_not_change_the_loss(runs: Matrix) -> None:
    assert runs["kl"].losses[0] < 0.1 * runs["untrained-nll"].losses[0]


def test_noise_is_the_same_again_in_a_resumed_run(runs: Matrix) -> None:
    assert runs["noisy-again"].losses == runs["noisy"].losses[3:]
    assert runs["noisy"].losses[0] != pytest.approx(runs["quiet"].losses[0], rel=1e-4)
