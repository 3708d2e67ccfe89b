"""The control law of the Shannon Control Unit: a pure state machine that adjusts lambda, the factor of the penalty.

The measurement M is S = ParamBPT / (DataBPT + ParamBPT), or K, the KL divergence from the base model in bits per token.

`logit` and `kl` (ours):  L = ln(S / (1 - S)), or ln K;   L_hat = L at first, then ema L + (1 - ema) L_hat
    until M first reaches the target, lambda is constant: lambda_start (logit), or 0 (kl, and then lambda_start);
        logit waits for at most `patience` updates, since S stays below the target if lambda_start is too large
    e = L_hat - L(target);   |e| <= deadband: lambda is unchanged
    otherwise  ln lambda <- ln lambda + P(e) - P(previous e) + Ki clip(e, -bound, bound), within lambda's bounds
        P(e) = Kp e;   kl, if e < 0:  P(e) = 8 Kp e, and 4 Ki in place of Ki
`published`:   S_hat = S at first, then ema S + (1 - ema) S_hat;   e = S_hat - target
    |e| <= deadband:  I <- leak I                                 lambda is unchanged
    otherwise:        I <- leak I, then clip(I + Ki e, -bound, bound) unless lambda is at a bound and e pushes outwards
                      lambda <- clip(lambda exp(Kp e + I), lambda_min, lambda_max)

The sign is plus: too much information raises lambda. ln lambda is itself an integrator, so in the published law Kp is
integral action and Ki double integral action. In that law, e at twice the target is 0.001 for a target of 0.1 %, but
0.25 for 25 %. With the logit, an error is a ratio at every target: logit S = ln ParamBPT - ln DataBPT.
Every rank runs this on the same reduced measurement in double precision, so the results are bitwise equal.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

Controller = Literal["pi", "fixed", "linear", "cosine", "none"]
Form = Literal["published", "logit", "kl"]
ERROR_BOUND = {"logit": 2.0, "kl": 0.5}
"""Bound on the error that Ki integrates, which limits how fast noise or a distant target can move lambda."""
BELOW_TARGET_FACTORS = {"logit": (1.0, 1.0), "kl": (8.0, 4.0)}
"""Factors of Kp and Ki while M is below the target. `kl` lowers lambda faster than it raises it: once the text is
learned and the learning rate falls, nothing pushes K up again (docs/lab/scu.md)."""
SLOPE = {"logit": 3.0, "kl": 2.0}
"""The largest -dL / d ln lambda: under a quadratic penalty a weight falls at most as 1 / lambda, so ParamBPT and K as
1 / lambda^2, while DataBPT rises as lambda to the power 0.33 to 0.68 (docs/lab/data/scu-compare-controllers.csv)."""
LAG_STEPS = 20.0
"""Time constant, in optimizer steps, of the first-order lag of the weights behind lambda (docs/lab/scu.md)."""
SMALL_ERROR = 0.05
"""Noise in the smoothed error between steps: 5 % of the ratio of ParamBPT to DataBPT, or of K."""
PATIENCE_LAGS, PATIENCE_FRACTION = 5.0, 0.1
"""S settles under a constant lambda within the longer of this many weight lags and this fraction of the run."""
TINY = 1e-12
GRANITE_GAINS = (0.6, 0.1)


@dataclass(frozen=True)
class Law:
    """Parameters of the controller; the schedules linear and cosine reach lambda_max after `total_updates`."""

    target: float
    controller: Controller = "pi"
    form: Form = "published"
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
    every: int = 1
    """Optimizer steps between updates."""

    def __post_init__(self) -> None:
        """Raise ValueError for gains that make lambda oscillate; the `scu` section checks all other fields."""
        if self.controller == "pi" and self.form != "published":
            _check_gains(self)

    @property
    def patience(self) -> float:
        """Number of updates for which `logit` waits for S to reach the target; `kl` waits indefinitely."""
        if self.form == "kl":
            return math.inf
        return max(PATIENCE_LAGS * LAG_STEPS / self.every, PATIENCE_FRACTION * self.total_updates)


@dataclass(frozen=True)
class ControllerState:
    lambda_: float
    integral: float = 0.0
    measured: float | None = None
    """The last M: S, or K in bits per token."""
    smoothed: float | None = None
    error: float | None = None
    updates: int = 0
    started: bool = True
    """False while the law waits for M to reach the target for the first time."""


def build_initial_state(law: Law) -> ControllerState:
    """Return the state before the first measurement; the controller `none` keeps lambda at 0."""
    waits = law.controller == "pi" and law.form != "published"
    is_off = law.controller == "none" or (waits and law.form == "kl")
    return ControllerState(lambda_=0.0 if is_off else law.lambda_start, started=not waits)


def advance(law: Law, state: ControllerState, measured: float) -> ControllerState:
    """Return the state after a measurement of S (dimensionless, in [0, 1]) or of K (bits per token).

    Raises ValueError for any other number, since continuing would hide a broken run.
    """
    if law.form == "kl" and not 0.0 <= measured < math.inf:
        raise ValueError(f"K={measured}: must be finite and not negative; the logits contain NaN or infinity")
    if law.form != "kl" and not 0.0 <= measured <= 1.0:
        raise ValueError(f"S={measured}: must be in [0, 1]; the loss or the adapter is not finite")
    state = replace(state, measured=measured, updates=state.updates + 1)
    if law.form != "published" and law.controller == "pi":
        return _advance_pi(law, state, measured)
    smoothed = measured if state.smoothed is None else law.ema * measured + (1.0 - law.ema) * state.smoothed
    error = smoothed - law.target
    state = replace(state, smoothed=smoothed, error=error)
    if law.controller == "pi":
        integral = law.leak * state.integral
        if abs(error) <= law.deadband:
            return replace(state, integral=integral)
        # Anti-windup: an integral that grew while lambda is at a bound must unwind before lambda can return.
        is_at_bound = (state.lambda_ >= law.lambda_max and error > 0) or (state.lambda_ <= law.lambda_min and error < 0)
        if not is_at_bound:
            integral = _clip(integral + law.ki * error, -law.integral_bound, law.integral_bound)
        lambda_ = _clip(state.lambda_ * _exp(law.kp * error + integral), law.lambda_min, law.lambda_max)
        return replace(state, integral=integral, lambda_=lambda_)
    return replace(state, lambda_=_compute_scheduled_lambda(law, state.updates))


def _advance_pi(law: Law, state: ControllerState, measured: float) -> ControllerState:
    if not state.started:
        error = _compute_level(law, measured) - _compute_level(law, law.target)
        begins = measured >= law.target or state.updates >= law.patience
        lambda_ = law.lambda_start if begins else state.lambda_
        return replace(state, smoothed=measured, error=error, lambda_=lambda_, started=begins)
    assert state.smoothed is not None and state.error is not None
    level = law.ema * _compute_level(law, measured) + (1.0 - law.ema) * _compute_level(law, state.smoothed)
    error = level - _compute_level(law, law.target)
    smoothed = _exp(level) if law.form == "kl" else 1.0 / (1.0 + _exp(-level))
    after = replace(state, smoothed=smoothed, error=error)
    if abs(error) <= law.deadband:
        return after
    bound = ERROR_BOUND[law.form]
    ki = law.ki * (BELOW_TARGET_FACTORS[law.form][1] if error < 0.0 else 1.0)
    move = (
        _compute_proportional_term(law, error)
        - _compute_proportional_term(law, state.error)
        + ki * _clip(error, -bound, bound)
    )
    return replace(after, lambda_=_clip(state.lambda_ * _exp(move), law.lambda_min, law.lambda_max))


def _compute_proportional_term(law: Law, error: float) -> float:
    return law.kp * (BELOW_TARGET_FACTORS[law.form][0] if error < 0.0 else 1.0) * error


def _compute_level(law: Law, measured: float) -> float:
    """Return logit S, or ln K, so that equal ratios become equal differences."""
    if law.form == "kl":
        return math.log(max(measured, TINY))
    ratio = _clip(measured, TINY, 1.0 - TINY)
    return math.log(ratio / (1.0 - ratio))


def _exp(value: float) -> float:
    # A double overflows beyond exp(709); exp(700) already saturates any lambda.
    return math.exp(_clip(value, -700.0, 700.0))


def _compute_scheduled_lambda(law: Law, updates: int) -> float:
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


def compute_s_ratio(data_bpt: float, param_bpt: float) -> float:
    """Return S = ParamBPT / (DataBPT + ParamBPT), both in bits per token; 0 if both are 0."""
    total = data_bpt + param_bpt
    return param_bpt / total if total != 0.0 else 0.0


def compute_steepest_slope(target: float) -> float:
    """Return the largest |dS / d ln lambda| at S = target for a quadratic penalty: 2 S (1 - S).

    dS / d ln ParamBPT is S (1 - S), and under a quadratic penalty a weight falls at most as 1 / lambda.
    """
    return 2.0 * target * (1.0 - target)


def compute_gain_bound(target: float) -> float:
    """Return the upper bound on Kp + Ki: 2 / |dS / d ln lambda| = 1 / (S (1 - S)) at the steepest slope.

    The bound ensures stability for a plant without lag and smoothing; `is_stable` includes the smoothing.
    """
    return 2.0 / compute_steepest_slope(target)


def is_stable(law: Law, slope: float) -> bool:
    """Return whether small deviations decay if M responds to ln lambda with the slope -`slope`.

    Published: S responds at once. With a = 1 - ema and x the deviation of ln lambda, one update multiplies (S_hat, I,
    x) by a matrix with the characteristic polynomial (z - 1)(z - a)(z - leak) + ema slope z (Kp (z - leak) + Ki z).
    Smoothing is a lag, which requires Ki well below ema Kp. Ours: L responds with a lag of LAG_STEPS, l <- p l - (1 -
    p) slope x; (L_hat, l, x) has (z - 1)(z - a)(z - p) + ema (1 - p) slope z (Kp (z - 1) + Ki z).
    """
    a = 1.0 - law.ema
    if law.form == "published":
        gain = law.ema * slope
        pole = law.leak if law.ki else 0.0  # without Ki nothing enters I, so its leak is irrelevant
        back = pole
    else:
        pole = max(0.0, 1.0 - law.every / LAG_STEPS)
        gain, back = law.ema * (1.0 - pole) * slope, 1.0
    c2 = gain * (law.kp + law.ki) - (1.0 + a + pole)
    c1 = a + pole + a * pole - gain * law.kp * back
    c0 = -a * pole
    # Jury's criterion: whether all roots of z^3 + c2 z^2 + c1 z + c0 lie inside the unit circle.
    return 1 + c2 + c1 + c0 > 0 and 1 - c2 + c1 - c0 > 0 and abs(c0) < 1 and 1 - c0 * c0 > abs(c0 * c2 - c1)


def _check_gains(law: Law) -> None:
    """Raise ValueError if the gains keep lambda from settling while M is above or below the target."""
    below_kp, below_ki = BELOW_TARGET_FACTORS[law.form]
    largest_kp = 1.0 / (SMALL_ERROR * below_kp)
    if law.ki == 0.0:
        raise ValueError(f"ki={law.ki:g}: lambda would never remove the error; use auto")
    if law.kp > largest_kp:
        raise ValueError(
            f"kp={law.kp:g}: noise of {SMALL_ERROR:g} in the error multiplies lambda by "
            f"{math.exp(min(law.kp / largest_kp, 100.0)):.3g}; use 0.5, or at most {largest_kp:g}"
        )
    above = replace(law, controller="fixed")
    below = replace(above, kp=below_kp * law.kp, ki=below_ki * law.ki)
    if not (is_stable(above, SLOPE[law.form]) and is_stable(below, SLOPE[law.form])):
        problem = f"lambda oscillates increasingly with scu.kp={law.kp:g} and scu.ema={law.ema:g}"
        raise ValueError(f"ki={law.ki:g}: {problem}; use auto for both gains")


def build_gain_warning(law: Law) -> str | None:
    """Return a warning if the published law's gains make lambda oscillate, or None; other laws reject such gains.

    The published Granite gains give no warning: they are the defaults of `zerolora scu-train`, and docs/lab/scu.md
    shows how far lambda oscillates with them.
    """
    if law.controller != "pi" or law.form != "published" or (law.kp, law.ki) == GRANITE_GAINS:
        return None
    bound = compute_gain_bound(law.target)
    if law.kp + law.ki > bound:
        problem = f"kp + ki = {law.kp + law.ki:g} exceeds {bound:.4g} = 1/(S (1 - S))"
    elif not is_stable(law, compute_steepest_slope(law.target)):
        problem = f"not stable with the smoothing of scu.ema={law.ema:g}"
    else:
        return None
    gains, fix = f"scu.kp={law.kp}, scu.ki={law.ki}", "use smaller gains, or scu.law: logit"
    return f"{gains}: {problem} at S = {law.target:g}; lambda may oscillate; {fix}"


def get_published_target(base_parameters: int) -> float:
    """Return the published S_target for a base model size: 1 % at 1B, 3 % at 3B to 7B; for other sizes, the nearest.

    The values were found with the measure `factors` and do not apply to `delta`.
    """
    return 0.01 if base_parameters < 2_000_000_000 else 0.03
