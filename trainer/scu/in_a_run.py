"""The Shannon Control Unit of a run: new or as its checkpoint left it, and what it does once training has ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trainer.model.adapter import count_parameters
from trainer.model.adapter_scale import scale_adapter, scaled_adapter
from trainer.parallel.ranks.progress import phase
from trainer.scu.base_samples import SteeringInputs, divergence_of
from trainer.scu.controller import Steering
from trainer.scu.fit import fit


def begin_steering(given: SteeringInputs, restored: dict[str, Any] | None, run_dir: Path) -> tuple[Steering, list[str]]:
    """The controller after optimizer step `given.step`, and what to warn of; every rank must call it.

    `restored` is its part of the checkpoint, `run_dir` where its records of earlier steps lie. Raises UserError for
    settings that cannot work.
    """
    scu, step = given.config.scu, given.step
    steering = Steering(
        scu,
        given.engine.module,
        target_tokens=given.prepared.data.stats.target_tokens,
        total_steps=given.total_steps,
        base_parameters=count_parameters(given.engine.module)[1],
        divergence=divergence_of(given) if scu.measure == "kl" else None,
    )
    if restored:
        return steering, steering.load_state_dict(restored, step=step, run_dir=run_dir)
    if step:
        return steering, ["scu.enabled=true: the checkpoint has no controller; it starts over"]
    return steering, []


@phase("steer")
def fit_to_target(steering: Steering | None, model: nn.Module, say: Callable[[str], None]) -> float:
    """Scale a trained adapter to the target of `kl` on text that was kept apart; every rank must call it.

    Returns the factor, 1 where nothing was kept apart. The model in memory counts for that much from here on; weights
    that are written have to be scaled by it.
    """
    divergence = steering.divergence if steering is not None else None
    if steering is None or divergence is None or divergence.kept is None:
        return 1.0

    def kl_bits(factor: float) -> float:
        with scaled_adapter(model, factor):
            return divergence.of_kept()

    was_training = model.training
    model.eval()
    fitted = steering.fitted = fit(kl_bits, steering.law.target, len(divergence.kept.documents))
    model.train(was_training)
    scale_adapter(model, fitted.factor)
    say(fitted.line(steering.law.target))
    return fitted.factor
