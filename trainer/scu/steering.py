"""Start the Shannon Control Unit of a run, new or from a checkpoint."""

from pathlib import Path
from typing import Any

from trainer.model.adapter import count_parameters
from trainer.scu.base_samples import SteeringInputs, build_divergence
from trainer.scu.controller import Steering


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
