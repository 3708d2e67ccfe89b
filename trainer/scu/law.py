"""The Shannon Control Unit's law: a pure state machine over plain numbers that moves one strength, lambda.

    S      = ParamBPT / (DataBPT + ParamBPT)                      share of information held in the parameters
    S_hat  = S at first, then ema S + (1 - ema) S_hat             smoothed
    e      = S_hat - target
    |e| <= deadband:  I <- leak I                                 lambda stays
    otherwise:        I <- leak I, then clip(I + Ki e, -bound, bound) unless lambda is at a bound and e pushes outwards
                      lambda <- clip(lambda exp(Kp e + I), lambda_min, lambda_max)

The sign is plus: too much parameter information raises lambda, which the loss multiplies with ParamBPT.
Every rank runs this on the same reduced measurement in the same double arithmetic, hence with the same bits.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Controller = Literal["pi", "fixed", "linear", "cosine", "none"]


@dataclass(frozen=True)
class Law:
    """The parameters of the controller; `total_updates` is how long linear and cosine take to reach lambda_max."""

    target: float
    controller: Controller = "pi"
    kp: float = 0.8
    ki: float = 0.15
    deadband: float = 0.002
    ema: float = 0.1
    leak: float = 0.995
    integral_bound: float = 0.2
    lambda_start: float = 1.0
    lambda_min: float = 1e-4
    lambda_max: float = 10.0
    total_updates: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for parameters with which the law means nothing."""
        if not 0.0 < self.target < 1.0:
            raise ValueError(f"target={self.target}: a share lies inside (0, 1)")
        if not 0.0 < self.lambda_min < self.lambda_max:
            raise ValueError(f"lambda_min={self.lambda_min}: must be positive and below lambda_max={self.lambda_max}")
        if not self.lambda_min <= self.lambda_start <= self.lambda_max:
            raise ValueError(f"lambda_start={self.lambda_start}: outside [{self.lambda_min}, {self.lambda_max}]")
        if not 0.0 < self.ema <= 1.0 or not 0.0 <= self.leak <= 1.0:
            raise ValueError(f"ema={self.ema}, leak={self.leak}: must lie in (0, 1] and [0, 1]")
        if min(self.kp, self.ki, self.deadband, self.integral_bound) < 0.0:
            raise ValueError(
                f"kp={self.kp}, ki={self.ki}, deadband={self.deadband}, integral_bound={self.integral_bound}: negative"
            )
        if self.total_updates < 1:
            raise ValueError(f"total_updates={self.total_updates}: must be at least 1")


@dataclass(frozen=True)
class State:
    """What the controller remembers: everything a checkpoint has to hold apart from a measurement under way."""

    lambda_: float
    integral: float = 0.0
    share: float | None = None
    smoothed: float | None = None
    error: float | None = None
    updates: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, which JSON and torch.save keep to the bit."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "State":
        """The state that `to_dict` wrote; ValueError names keys that are missing or unknown."""
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise ValueError(f"controller state with keys {sorted(values)}: expected {sorted(known)}")
        return cls(**values)


def initial(law: Law) -> State:
    """The state before the first measurement; the controller `none` measures only and keeps lambda at 0."""
    return State(lambda_=0.0 if law.controller == "none" else law.lambda_start)


def advance(law: Law, state: State, share: float) -> State:
    """The state after one measurement of S, dimensionless in [0, 1].

    Raises ValueError if S is not a number in [0, 1]: steering on by guesswork would hide a broken run.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"S={share}: a share of information lies in [0, 1]; the loss or the adapter is not finite")
    smoothed = share if state.smoothed is None else law.ema * share + (1.0 - law.ema) * state.smoothed
    error = smoothed - law.target
    measured = replace(state, share=share, smoothed=smoothed, error=error, updates=state.updates + 1)
    if law.controller == "pi":
        return _proportional_integral(law, measured, error)
    return replace(measured, lambda_=_scheduled(law, measured.updates))


def _proportional_integral(law: Law, state: State, error: float) -> State:
    integral = law.leak * state.integral
    if abs(error) <= law.deadband:
        return replace(state, integral=integral)
    # Anti-windup: at a bound, an integral that still grew outwards would have to unwind before lambda could return.
    pushes_out = (state.lambda_ >= law.lambda_max and error > 0) or (state.lambda_ <= law.lambda_min and error < 0)
    if not pushes_out:
        integral = _clip(integral + law.ki * error, -law.integral_bound, law.integral_bound)
    # exp overflows a double beyond 709; 700 already saturates any lambda.
    factor = math.exp(_clip(law.kp * error + integral, -700.0, 700.0))
    return replace(state, integral=integral, lambda_=_clip(state.lambda_ * factor, law.lambda_min, law.lambda_max))


def _scheduled(law: Law, updates: int) -> float:
    """The controllers that do not look at S."""
    progress = min(updates / law.total_updates, 1.0)
    span = law.lambda_max - law.lambda_start
    match law.controller:
        case "linear":
            return law.lambda_start + span * progress
        case "cosine":
            return law.lambda_start + span * (1.0 - math.cos(math.pi * progress)) / 2.0
        case "fixed":
            return law.lambda_start
        case _:
            return 0.0


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def share_of(data_bpt: float, param_bpt: float) -> float:
    """S = ParamBPT / (DataBPT + ParamBPT), both in bits per token; 0 where both are 0."""
    total = data_bpt + param_bpt
    return param_bpt / total if total != 0.0 else 0.0


def steepest_slope(target: float) -> float:
    """The largest |dS / d ln lambda| at S = target for a quadratic term: 2 S (1 - S).

    S moves by S (1 - S) per unit of ln ParamBPT; a weight that a quadratic term holds back falls at most as 1 / lambda.
    """
    return 2.0 * target * (1.0 - target)


def gain_bound(target: float) -> float:
    """What Kp + Ki must stay below: 2 / |dS / d ln lambda| = 1 / (S (1 - S)) at the steepest slope.

    It keeps a plant stable that answers at once and whose S is not smoothed; `is_stable` counts smoothing in as well.
    """
    return 2.0 / steepest_slope(target)


def is_stable(law: Law, slope: float) -> bool:
    """Whether small deviations die out when S answers ln lambda at once with -slope, smoothing and leak included.

    With a = 1 - ema and x the deviation of ln lambda, one update multiplies (S_hat, I, x) by a matrix whose
    characteristic polynomial is (z - 1)(z - a)(z - leak) + ema slope z (Kp (z - leak) + Ki z); Jury's criterion says
    whether all its roots lie inside the unit circle. Smoothing is a lag: it asks for Ki well below ema Kp.
    """
    a, gain = 1.0 - law.ema, law.ema * slope
    leak = law.leak if law.ki else 0.0  # without Ki nothing enters I, and how it would leak is no matter
    c2 = gain * (law.kp + law.ki) - (1.0 + a + leak)
    c1 = a + leak + a * leak - gain * law.kp * leak
    c0 = -a * leak
    return 1 + c2 + c1 + c0 > 0 and 1 - c2 + c1 - c0 > 0 and abs(c0) < 1 and 1 - c0 * c0 > abs(c0 * c2 - c1)


def gain_warning(law: Law) -> str | None:
    """One line if the gains exceed the bound of stability, else None."""
    bound = gain_bound(law.target)
    if law.controller != "pi" or law.kp + law.ki <= bound:
        return None
    return (
        f"scu.kp={law.kp}, scu.ki={law.ki}: kp + ki = {law.kp + law.ki:g} exceeds {bound:.4g} = 1/(S (1 - S)) at "
        f"S = {law.target:g}; lambda may oscillate, use smaller gains"
    )


def published_target(base_parameters: int) -> float:
    """The published S_target by size of the base model: 1 % at 1B, 3 % at 3B to 7B (nearest beyond these).

    They were found with the measure `factors` and say nothing about `delta`.
    """
    return 0.01 if base_parameters < 2_000_000_000 else 0.03


def reachable_shares(param_bpt_low: float, param_bpt_high: float, data_bpt: float) -> tuple[float, float]:
    """The range of S for ParamBPT between two bounds at a given DataBPT, all in bits per token."""
    return share_of(data_bpt, param_bpt_low), share_of(data_bpt, param_bpt_high)
