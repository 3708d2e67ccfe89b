"""Build the control law and the measure from the `scu` section, and adapt a checkpoint's state to new settings."""

from dataclasses import replace

from torch import nn

from trainer.config import ScuSection, UserError
from trainer.config.sections import AUTO_TARGET
from trainer.parallel.engine.flat_adapter import find_flat_adapter
from trainer.scu import law as scu
from trainer.scu.information import AdapterInformation, Measure, find_pairs

AUTO_TARGET_BITS = 0.05
"""Target for K if `scu.target` is `auto`, in bits per token."""
LAW_SETTINGS = ("kp", "ki", "deadband", "ema", "leak", "integral_bound", "lambda_start", "lambda_min", "lambda_max")
"""Settings that are fields of the law."""


def build_adapter_information(section: ScuSection, model: nn.Module, tokens: int | None) -> AdapterInformation:
    """Build the adapter's information measure. Raises UserError if the number of tokens is unknown."""
    if not tokens:
        raise UserError("scu.tokens: the number of target tokens in an epoch is unknown; set scu.tokens")
    measure: Measure = "factors" if section.measure == "factors" else "delta"
    return AdapterInformation(
        find_pairs(model), measure, sigma=float(section.sigma), tokens=tokens, flat=find_flat_adapter(model)
    )


def adapt_state(law: scu.Law, state: scu.ControllerState) -> tuple[scu.ControllerState, list[str]]:
    """Return a checkpoint's state, adapted to a law with other bounds or another controller, and notes on changes."""
    if law.controller not in ("pi", "fixed"):
        return state, []
    if state.lambda_ == 0.0 and state.started:  # saved by the controller `none`
        new_state = scu.build_initial_state(law)
        return new_state, [f"scu.controller={law.controller}: was none before; lambda starts at {new_state.lambda_:g}"]
    if law.controller == "fixed":
        lambda_ = law.lambda_start
    else:
        # Inside the deadband, lambda would never move back into its bounds.
        lambda_ = min(max(state.lambda_, law.lambda_min), law.lambda_max) if state.lambda_ else 0.0
    if lambda_ == state.lambda_:
        return state, []
    note = f"scu: lambda was {state.lambda_:g} in the checkpoint and is {lambda_:g} now"
    return replace(state, lambda_=lambda_), [note]


def build_law(section: ScuSection, *, total_steps: int, base_parameters: int) -> scu.Law:
    """Build the law from the settings. Raises UserError if its gains are unstable."""
    target = section.target
    form: scu.Form = "kl" if section.measure == "kl" else section.law
    if target == "auto":
        auto = {"delta": AUTO_TARGET, "factors": scu.get_published_target(base_parameters), "kl": AUTO_TARGET_BITS}
        target = auto[section.measure]
    try:
        return scu.Law(
            target=target,
            controller=section.controller,
            form=form,
            total_updates=max(1, total_steps // section.every),
            every=section.every,
            **{name: float(getattr(section, name)) for name in LAW_SETTINGS},
        )
    except ValueError as error:
        raise UserError(f"scu.{error}") from None
