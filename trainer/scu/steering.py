"""Start the Shannon Control Unit of a run, new or from a checkpoint, and scale the adapter after training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trainer.model.adapter import count_parameters
from trainer.model.adapter_scale import scale_adapter, scaled_adapter
from trainer.parallel.ranks.progress import phase
from trainer.scu.base_samples import SteeringInputs, build_divergence
from trainer.scu.controller import Steering
from trainer.scu.fit import fit


def start_steering(
    inputs: SteeringInputs, restored: dict[str, Any] | None, run_dir: Path
) -> tuple[Steering, list[str]]:
    """Build the controller after optimizer step `inputs.step`; return it with warnings. A collective call.

    `restored` is its state in the checkpoint, `run_dir` holds its records of earlier steps. Raises UserError for
    settings that cannot work.
    """
    scu, step = inputs.config.scu, inputs.step
    steering = Steering(
        scu,
        inputs.engine.module,
        target_tokens=inputs.prepared.data.stats.target_tokens,
        total_steps=inputs.total_steps,
        base_parameters=count_parameters(inputs.engine.module)[1],
        divergence=build_divergence(inputs) if scu.measure == "kl" else None,
    )
    if restored:
        return steering, steering.load_state_dict(restored, step=step, run_dir=run_dir)
    if step:
        return steering, ["scu.enabled=true: the checkpoint has no controller; it starts over"]
    return steering, []


@phase("steer")
def fit_to_target(steering: Steering | None, model: nn.Module, say: Callable[[str], None]) -> float:
    """Scale a trained adapter to the target of `kl` on held-out text; a collective call.

    Returns the factor, 1 without held-out text. The model in memory is scaled; written weights still have to be.
    """
    divergence = steering.divergence if steering is not None else None
    if steering is None or divergence is None or divergence.held_out is None:
        return 1.0

    def kl_bits(factor: float) -> float:
        with scaled_adapter(model, factor):
            return divergence.measure_held_out()

    was_training = model.training
    model.eval()
    fitted = steering.fitted = fit(kl_bits, steering.law.target, len(divergence.held_out.documents))
    model.train(was_training)
    scale_adapter(model, fitted.factor)
    say(fitted.line(steering.law.target))
    return fitted.factor
