"""The Shannon Control Unit of a run: new, or as its checkpoint left it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.data.prepared import Prepared
from trainer.engine.protocol import Engine
from trainer.model.adapter import count_parameters
from trainer.patches.loss_head import TokenLoss
from trainer.ranks.group import Ranks
from trainer.scu.base_samples import divergence_of
from trainer.scu.controller import Steering


def begin_steering(
    config: RunConfig,
    prepared: Prepared,
    ranks: Ranks,
    engine: Engine,
    token_loss: TokenLoss,
    *,
    flat: bool,
    packed_reference: bool,
    total_steps: int,
    step: int,
    restored: dict[str, Any] | None,
    run_dir: Path,
    say: Callable[[str], None],
) -> tuple[Steering, list[str]]:
    """The controller after optimizer step `step`, and what to warn of; every rank must call it.

    `restored` is its part of the checkpoint, `run_dir` where its records of earlier steps lie. Raises UserError for
    settings that cannot work.
    """
    divergence = None
    if config.scu.measure == "kl":
        divergence = divergence_of(
            config, prepared, ranks, engine, token_loss,
            flat=flat, packed=packed_reference, steps=total_steps, resumes=step > 0, say=say,
        )  # fmt: skip
    steering = Steering(
        config.scu,
        engine.module,
        target_tokens=prepared.data.stats.target_tokens,
        total_steps=total_steps,
        base_parameters=count_parameters(engine.module)[1],
        divergence=divergence,
    )
    if restored:
        return steering, steering.load_state_dict(restored, step=step, run_dir=run_dir)
    if step:
        return steering, ["scu.enabled=true: the checkpoint has no controller; it starts over"]
    return steering, []
