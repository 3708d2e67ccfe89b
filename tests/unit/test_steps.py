"""The number of steps is the same wherever it is reported, and what it makes of other settings is said beforehand."""

from typing import Any

import numpy as np
import pytest
import torch

from trainer.config import AUTO, RunConfig, UserError
from trainer.data.batches import Batches
from trainer.data.samples import Samples
from trainer.data.step_count import (
    compute_steps_per_epoch,
    compute_warmup_steps,
    count_steps,
    describe_steps,
    list_step_warnings,
    resolve_eval_and_save_steps,
    resolve_global_batch,
)
from trainer.parallel.engine.optimizer import build_schedule


def config_of(dataset: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    settings = {"base_model": "m", "output_dir": "o", "dataset": {"path": "d"} | (dataset or {}), "training": training}
    return RunConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("samples", "ranks", "training", "steps"),
    [
        (7, 1, {"batch_size": 8, "gradient_accumulation_steps": 2, "epochs": 10}, 10),
        (7, 2, {"batch_size": 2, "epochs": 3}, 6),
        (100, 1, {"batch_size": 3, "epochs": 0.5}, 17),
        (100, 4, {"max_steps": 9}, 9),
        (None, 1, {"max_steps": 9}, 9),
        (100, 1, {"batch_size": "auto"}, None),
        (100, 1, {"batch_size": "auto", "global_batch_size": 10, "epochs": 2}, 20),
    ],
)
def test_steps_are_counted_as_training_takes_them(
    samples: int | None, ranks: int, training: dict[str, Any], steps: int | None
) -> None:
    settings = resolve_global_batch(config_of(**training), samples, ranks).training
    assert count_steps(settings, samples, ranks) == steps
    if samples and settings.batch_size != AUTO and settings.max_steps is None:
        batches = batches_of(settings, samples, ranks)
        epoch_steps = compute_steps_per_epoch(len(batches.samples), batches.global_batch_size)
        assert steps == np.ceil(settings.epochs * epoch_steps)
        assert describe_steps(settings, samples, ranks).startswith(f"{steps} ({epoch_steps} per epoch), ")


def batches_of(training: Any, samples: int, ranks: int) -> Batches:
    class Counted(Samples):
        packed = False

        def __init__(self) -> None:
            pass

        def __len__(self) -> int:
            return samples

    return Batches(
        Counted(),
        batch_size=training.batch_size,
        accumulation=training.gradient_accumulation_steps,
        rank=0,
        world_size=ranks,
        seed=0,
        shuffle=True,
        pad_token_id=0,
        flat=False,
    )


@pytest.mark.parametrize(
    ("samples", "ranks", "training", "resolved"),
    [
        # auto: a power of two that leaves 100 steps, 32 at most, the same on any power of two of ranks
        (7, 1, {"epochs": 3, "batch_size": 8}, (1, 1, 1)),
        (120, 1, {"epochs": 3, "batch_size": 8}, (2, 2, 1)),
        (1_000, 1, {"epochs": 3, "batch_size": 8}, (16, 8, 2)),
        (1_000, 2, {"epochs": 3, "batch_size": 8}, (16, 8, 1)),
        (1_000, 8, {"epochs": 3, "batch_size": 8}, (16, 2, 1)),
        (1_000_000, 1, {"batch_size": 3}, (32, 2, 16)),
        (1_000_000, 64, {"batch_size": 4}, (64, 1, 1)),
        (1_000_000, 3, {"batch_size": 4}, (24, 4, 2)),
        (None, 4, {"batch_size": 2, "max_steps": 5}, (32, 2, 4)),
        (1_000_000, 4, {"batch_size": "auto"}, (32, AUTO, 1)),
        # a number: exactly that many, in the largest micro-batches that divide a rank's part
        (100, 1, {"global_batch_size": 64, "batch_size": 4}, (64, 4, 16)),
        (100, 4, {"global_batch_size": 64, "batch_size": 4}, (64, 4, 4)),
        (100, 4, {"global_batch_size": 8, "batch_size": 4}, (8, 2, 1)),
        (100, 1, {"global_batch_size": 10, "batch_size": 4}, (10, 2, 5)),
    ],
)
def test_the_global_batch_fits_the_data(
    samples: int | None, ranks: int, training: dict[str, Any], resolved: tuple[int, int, int]
) -> None:
    once = resolve_global_batch(config_of(**({"global_batch_size": "auto"} | training)), samples, ranks)
    found = once.training
    assert (found.global_batch_size, found.batch_size, found.gradient_accumulation_steps) == resolved
    assert resolve_global_batch(once, samples, ranks) == once, "what is recorded resolves to itself"


def test_a_global_batch_that_ranks_cannot_share() -> None:
    with pytest.raises(
        UserError, match=r"global_batch_size=64: cannot be divided evenly among 3 ranks; use 63, or auto"
    ):
        resolve_global_batch(config_of(global_batch_size=64), 1000, 3)
    with pytest.raises(UserError, match=r"global_batch_size=1: cannot be divided evenly among 4 ranks; use 4"):
        resolve_global_batch(config_of(global_batch_size=1), 1000, 4)
    assert resolve_global_batch(config_of(batch_size=3), 1000, 7) == config_of(batch_size=3)


@pytest.mark.parametrize(
    ("training", "resolved"),
    [
        ({"evals_per_epoch": 4, "saves_per_epoch": 1}, (13, 50)),
        ({"evals_per_epoch": 0.5, "batch_size": 2}, (50, 500)),
        ({"evals_per_epoch": 1000, "saves_per_epoch": 3}, (1, 17)),
        ({"evals_per_epoch": 4, "saves_per_epoch": 1, "best_checkpoint": True}, (13, 52)),
        ({"eval_steps": 20, "saves_per_epoch": 1, "best_checkpoint": True}, (20, 60)),
    ],
)
def test_looks_an_epoch_become_steps(training: dict[str, Any], resolved: tuple[int, int]) -> None:
    found = resolve_eval_and_save_steps(config_of({"val_split": 0.1}, **({"batch_size": 1} | training)), 100, 2)
    assert (found.training.eval_steps, found.training.save_steps) == resolved
    assert resolve_eval_and_save_steps(found, 100, 2) == found and found.training.evals_per_epoch is None


def test_few_steps_are_said_with_what_to_change() -> None:
    packed = config_of({"packing": True, "val_split": 0.05}, epochs=3, batch_size=8, gradient_accumulation_steps=2)
    (line,) = list_step_warnings(packed, 7, 1)
    assert line == (
        "3 optimizer steps in total, the first one with a learning rate of 0 (7 samples, 16 per step): too few to "
        "learn much; try training.global_batch_size=auto, or more training.epochs, or dataset.packing=false"
    )
    assert list_step_warnings(config_of(epochs=3, batch_size=1), 7, 1) == [], "21 steps"
    assert list_step_warnings(config_of(max_steps=3), 7, 1) == [], "asked for"


def test_evaluations_that_never_come_are_said() -> None:
    training = {"max_steps": 60, "eval_steps": 100, "save_steps": 100}
    lines = list_step_warnings(config_of({"val_split": 0.1}, best_checkpoint=True, **training), 7, 1)
    assert lines == [
        "training.eval_steps=100: the run has 60 steps, so it is only evaluated at the end, and best_checkpoint and "
        "early_stopping have no losses to compare; use 15",
    ]
    given = config_of({"val_split": 0.1}, max_steps=6, evals_per_epoch=0.5)
    lines = list_step_warnings(resolve_eval_and_save_steps(given, 7, 1), 7, 1, given)
    assert lines == [
        "training.evals_per_epoch=0.5: is every 14 steps, but the run has 6 steps, so it is only evaluated at the end; "
        "use 7"
    ]
    assert list_step_warnings(config_of(max_steps=60), 7, 1) == [], "the default is not remarked on"


@pytest.mark.parametrize(
    ("setting", "period"),
    [
        ("training.eval_steps", {"training": {"eval_steps": 61}}),
        ("training.save_steps", {"training": {"save_steps": 61}}),
        ("training.logging_steps", {"training": {"logging_steps": 61}}),
        ("training.early_stopping", {"training": {"eval_steps": 10, "early_stopping": 6}}),
        ("image.sample_every", {"image": {"sample_every": 61}, "task": "image", "logging": {"sample_prompts": ["a"]}}),
        ("scu.every", {"scu": {"every": 61, "enabled": True}}),
    ],
)
def test_a_period_that_the_run_does_not_reach_is_warned_of(setting: str, period: dict[str, Any]) -> None:
    def warn(steps: int, held_out: float = 0.1) -> list[str]:
        training = {"max_steps": steps} | period.get("training", {})
        sections = {"training": training, "dataset": {"path": "a.jsonl", "val_split": held_out}}
        return list_step_warnings(
            RunConfig.model_validate({"base_model": "m", "output_dir": "r"} | period | sections), 7, 1
        )

    (line,) = warn(60)
    assert (line.startswith(f"{setting}={6 if 'early' in setting else 61}: ") and "60" in line) or "6 eval" in line
    assert warn(70) == []
    if setting in ("training.eval_steps", "training.early_stopping"):
        assert warn(60, held_out=0.0) == []


def test_a_warm_up_longer_than_the_run_is_refused_for_epochs_too() -> None:
    with pytest.raises(UserError, match=r"training.warmup_steps=100: .* run of 3 steps"):
        list_step_warnings(config_of(epochs=3, batch_size=8, warmup_steps=100), 7, 1)
    assert list_step_warnings(config_of(epochs=30, warmup_steps=100), 7, 1) == []
    constant = config_of(epochs=30, lr_scheduler="constant", warmup_steps=1000)
    assert list_step_warnings(constant, 7, 1) == [], "a constant rate has no warm-up"


@pytest.mark.parametrize(("ratio", "total", "warmup"), [(0.03, 1, 0), (0.9, 1, 0), (0.99, 5, 4), (0.1, 5, 1)])
def test_the_last_step_is_never_part_of_the_warm_up(ratio: float, total: int, warmup: int) -> None:
    training = config_of(max_steps=total, warmup_ratio=ratio).training
    assert compute_warmup_steps(training, total) == warmup
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    schedule = build_schedule(optimizer, training, total)
    for _ in range(warmup):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == training.learning_rate
