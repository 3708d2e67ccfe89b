"""The control law, by properties that must hold for every state and by plants simulated in two lines."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.any_input import tries
from trainer.scu import law as scu

ratios = st.floats(0.0, 1.0)
targets = st.floats(0.005, 0.9)


@st.composite
def laws(draw: st.DrawFn) -> scu.Law:
    lambda_min = draw(st.floats(1e-6, 1.0))
    lambda_max = lambda_min * draw(st.floats(1.5, 1e6))
    return scu.Law(
        target=draw(targets),
        kp=draw(st.floats(0.0, 50.0)),
        ki=draw(st.floats(0.0, 10.0)),
        deadband=draw(st.floats(0.0, 0.05)),
        ema=draw(st.floats(0.01, 1.0)),
        leak=draw(st.floats(0.5, 1.0)),
        integral_bound=draw(st.floats(0.01, 1.0)),
        lambda_start=min(lambda_max, math.sqrt(lambda_min * lambda_max)),
        lambda_min=lambda_min,
        lambda_max=lambda_max,
    )


def settled(law: scu.Law, odds: float, within: float | None = None) -> tuple[bool, scu.ControllerState]:
    """Run the law on S / (1 - S) = odds / lambda^2, with slope 2 S (1 - S): do the last errors stay `within`?"""
    state, errors = scu.build_initial_state(law), []
    for _ in range(3000):
        state = scu.advance(law, state, 1.0 / (1.0 + state.lambda_**2 / odds))
        assert state.error is not None
        errors.append(abs(state.error))
    return max(errors[-100:]) <= (law.deadband if within is None else within), state


def odds_for(target: float, lambda_: float) -> float:
    """Build a plant with S = `target` at lambda = `lambda_`."""
    return target / (1.0 - target) * lambda_**2


@given(laws(), st.lists(ratios, min_size=1, max_size=60))
def test_lambda_and_integral_stay_in_their_bounds(law: scu.Law, measured: list[float]) -> None:
    state = scu.build_initial_state(law)
    for ratio in measured:
        state = scu.advance(law, state, ratio)
        assert law.lambda_min <= state.lambda_ <= law.lambda_max
        assert abs(state.integral) <= law.integral_bound
        assert state.smoothed is not None and 0.0 <= state.smoothed <= 1.0
    assert state.updates == len(measured)


@given(laws(), ratios)
def test_sign_too_much_parameter_information_raises_lambda(law: scu.Law, ratio: float) -> None:
    assume(law.kp > 0.01 and abs(ratio - law.target) > law.deadband + 1e-3)
    state = scu.advance(law, scu.build_initial_state(law), ratio)
    assert (state.lambda_ > law.lambda_start) == (ratio > law.target)
    assert (state.lambda_ < law.lambda_start) == (ratio < law.target)


@given(laws(), ratios, ratios)
def test_more_information_never_gives_a_smaller_lambda(law: scu.Law, one: float, other: float) -> None:
    low, high = sorted((one, other))
    start = scu.build_initial_state(law)
    assert scu.advance(law, start, low).lambda_ <= scu.advance(law, start, high).lambda_


@given(laws(), st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
def test_deadband_keeps_lambda_and_leaks_the_integral(law: scu.Law, where: float, integral: float) -> None:
    ratio = law.target + 0.999 * where * law.deadband
    assume(0.0 <= ratio <= 1.0)
    before = replace(scu.build_initial_state(law), integral=integral * law.integral_bound)
    after = scu.advance(law, before, ratio)
    assert after.lambda_ == before.lambda_
    assert after.integral == law.leak * before.integral


@given(laws(), st.booleans(), st.floats(-1.0, 1.0), st.integers(1, 30))
def test_anti_windup_at_a_bound_the_integral_only_leaks(law: scu.Law, top: bool, start: float, updates: int) -> None:
    ratio = 1.0 if top else 0.0
    assume(abs(ratio - law.target) > law.deadband)
    bound = law.lambda_max if top else law.lambda_min
    # Whatever integral pulls inwards could leave the bound, so it starts at zero or pushes outwards.
    integral = abs(start) * law.integral_bound * (1 if top else -1)
    state = replace(scu.build_initial_state(law), lambda_=bound, integral=integral)
    for _ in range(updates):
        state = scu.advance(law, state, ratio)
        assert state.lambda_ == bound
    assert state.integral == pytest.approx(integral * law.leak**updates, abs=1e-12)


def test_anti_windup_lets_lambda_return_at_once() -> None:
    law = scu.Law(target=0.1, ema=1.0)
    state = scu.build_initial_state(law)
    for _ in range(500):
        state = scu.advance(law, state, 0.9)
    assert state.lambda_ == law.lambda_max
    for _ in range(5):
        state = scu.advance(law, state, 0.0)
    assert state.lambda_ < law.lambda_max


def test_an_integral_pushing_inwards_still_grows_at_a_bound() -> None:
    law = scu.Law(target=0.1, ema=1.0)
    state = scu.advance(law, replace(scu.build_initial_state(law), lambda_=law.lambda_max), 0.05)
    assert state.integral == pytest.approx(-0.15 * 0.05)


def test_one_update_by_hand() -> None:
    law = scu.Law(target=0.02, kp=0.8, ki=0.15, deadband=0.002, ema=0.1, leak=0.995)
    first = scu.advance(law, scu.build_initial_state(law), 0.06)
    assert (first.smoothed, first.error) == (0.06, pytest.approx(0.04))
    assert first.integral == pytest.approx(0.15 * 0.04)
    assert first.lambda_ == pytest.approx(math.exp(0.8 * 0.04 + 0.15 * 0.04))
    second = scu.advance(law, first, 0.01)
    assert second.smoothed == pytest.approx(0.1 * 0.01 + 0.9 * 0.06)
    assert second.integral == pytest.approx(0.995 * 0.006 + 0.15 * 0.035)
    assert second.lambda_ == pytest.approx(first.lambda_ * math.exp(0.8 * 0.035 + second.integral))


@given(st.floats(0.005, 0.6), st.floats(0.1, 0.9), st.floats(0.01, 5.0))
@tries(40)
def test_converges_to_the_target_within_the_gain_bound(target: float, part: float, lambda_: float) -> None:
    gains = part * scu.compute_gain_bound(target)
    law = scu.Law(target=target, kp=0.8 * gains, ki=0.2 * gains, ema=1.0, deadband=0.02 * target)
    inside, state = settled(law, odds_for(target, lambda_))
    assert inside
    # d ln(odds) = dS / (S (1 - S)), and lambda is the odds' root.
    assert state.lambda_ == pytest.approx(lambda_, rel=0.04 / (1.0 - target))


@given(st.floats(0.02, 0.6), st.floats(0.2, 0.95), st.booleans())
@tries(40)
def test_unstable_beyond_the_gain_bound_and_stable_below(target: float, off: float, beyond: bool) -> None:
    kp = scu.compute_gain_bound(target) * (1.0 + off if beyond else 1.0 - off)
    law = scu.Law(target=target, kp=kp, ki=0.0, ema=1.0, deadband=0.0)
    # No deadband here: a swing that happens to land in it would stop there.
    inside, _ = settled(law, odds_for(target, 1.001), within=1e-4 * target)
    assert inside == (not beyond)
    assert (scu.build_gain_warning(law) is not None) == beyond
    assert scu.is_stable(law, scu.compute_steepest_slope(target)) == (not beyond)


@given(
    st.floats(0.05, 2.0), st.just(0.0) | st.floats(1e-3, 1.0), st.floats(0.05, 1.0), st.floats(0.9, 1.0),
    st.floats(0.05, 0.5),
)  # fmt: skip
@tries(40)
def test_predicted_stability_is_that_of_the_simulated_deviation(
    kp: float, ki: float, ema: float, leak: float, slope: float
) -> None:
    law = scu.Law(target=0.5, kp=kp, ki=ki, ema=ema, leak=leak, deadband=0.0, integral_bound=1.0)
    stable = scu.is_stable(law, slope)
    # A margin on both sides: near the limit, neither growth nor decay shows in a finite time.
    assume(all(scu.is_stable(law, slope * factor) == stable for factor in (0.7, 1.4)))
    assume(scu.is_stable(replace(law, ki=0.7 * ki), slope) == stable == scu.is_stable(replace(law, ki=1.4 * ki), slope))
    state, sizes = scu.build_initial_state(law), []
    for step in range(3000):
        deviation = math.log(state.lambda_) if step else 1e-6
        state = scu.advance(law, state, min(max(0.5 - slope * deviation, 0.0), 1.0))
        sizes.append(abs(deviation))
    assert (max(sizes[-200:]) < sizes[0]) == stable


def test_published_gains_swing_at_three_percent_and_a_smaller_ki_does_not() -> None:
    published = scu.Law(target=0.03)
    calm = scu.Law(target=0.03, ki=0.01)
    slope = scu.compute_steepest_slope(0.03)
    warning = scu.build_gain_warning(published)
    assert warning is not None and "not stable with the smoothing" in warning and scu.build_gain_warning(calm) is None
    assert (scu.is_stable(published, slope), scu.is_stable(calm, slope)) == (False, True)
    assert not settled(published, odds_for(0.03, 0.3))[0]
    assert settled(calm, odds_for(0.03, 0.3))[0]


@pytest.mark.parametrize(
    ("controller", "expected"),
    [
        ("fixed", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [4.0, 6.0, 8.0, 10.0, 10.0]),
        ("cosine", [2 + 4 * (1 - math.sqrt(0.5)), 6.0, 2 + 4 * (1 + math.sqrt(0.5)), 10.0, 10.0]),
        ("none", [0.0] * 5),
    ],
)
def test_controllers_that_do_not_look(controller: scu.Controller, expected: list[float]) -> None:
    law = scu.Law(target=0.1, controller=controller, lambda_start=2.0, total_updates=4)
    state, got = scu.build_initial_state(law), []
    assert state.lambda_ == (0.0 if controller == "none" else 2.0)
    for ratio in (0.9, 0.0, 0.5, 0.1, 1.0):
        state = scu.advance(law, state, ratio)
        got.append(state.lambda_)
    assert got == pytest.approx(expected)


@given(laws(), st.lists(ratios, min_size=2, max_size=40), st.integers(1, 39))
def test_state_survives_json_to_the_bit(law: scu.Law, measured: list[float], cut: int) -> None:
    whole = resumed = scu.build_initial_state(law)
    for index, ratio in enumerate(measured):
        if index == cut:
            resumed = scu.ControllerState(**json.loads(json.dumps(asdict(resumed))))
        whole, resumed = scu.advance(law, whole, ratio), scu.advance(law, resumed, ratio)
        assert whole == resumed


@pytest.mark.parametrize("ratio", [math.nan, math.inf, -0.01, 1.01])
def test_what_is_no_share_is_refused(ratio: float) -> None:
    law = scu.Law(target=0.1)
    with pytest.raises(ValueError, match="S="):
        scu.advance(law, scu.build_initial_state(law), ratio)


def test_gain_warning_names_the_bound() -> None:
    assert scu.compute_gain_bound(0.5) == 4.0
    warning = scu.build_gain_warning(scu.Law(target=0.5, kp=3.9, ki=0.2))
    assert warning is not None and "exceeds 4 " in warning
    assert scu.build_gain_warning(scu.Law(target=0.5, kp=3.9, ki=0.05, ema=1.0)) is None
    assert scu.build_gain_warning(scu.Law(target=0.5, kp=9.0, controller="fixed")) is None


def test_ratios_and_published_targets() -> None:
    assert scu.compute_s_ratio(3.0, 1.0) == 0.25
    assert scu.compute_s_ratio(0.0, 0.0) == 0.0
    sizes = (1_200_000_000, 3_000_000_000, 7_000_000_000)
    assert [scu.get_published_target(size) for size in sizes] == [0.01, 0.03, 0.03]


def ours(**changes: Any) -> scu.Law:
    settings: dict[str, Any] = {"target": 0.01, "form": "logit", "kp": 0.5, "ki": 0.025, "deadband": 0.05}
    settings |= {"lambda_start": 0.1}
    return scu.Law(**(settings | {"lambda_max": 1e4} | changes))


def run_on_lagging_plant(law: scu.Law, slope: float, lambda_: float, updates: int = 1500) -> list[scu.ControllerState]:
    """L follows L(target) - slope ln(lambda / lambda_) with a lag of 20 steps, from far below the target."""
    wanted = math.log(law.target) if law.form == "kl" else math.log(law.target / (1.0 - law.target))
    level, state, states = wanted - 6.0, scu.build_initial_state(law), []
    for _ in range(updates):
        # The term is off, or weak, until the target is passed: then what is measured would rise five-hundredfold.
        far = wanted - slope * math.log(max(state.lambda_, 1e-3 * lambda_) / lambda_)
        level += (min(far, wanted + 6.0) - level) / 20.0
        state = scu.advance(law, state, math.exp(level) if law.form == "kl" else 1.0 / (1.0 + math.exp(-level)))
        states.append(state)
    return states


@pytest.mark.parametrize("target", [0.0005, 0.01, 0.25])
@pytest.mark.parametrize("slope", [0.7, 1.5, 3.0])
@pytest.mark.parametrize("lambda_", [0.5, 33.0, 2000.0])
def test_one_set_of_gains_holds_every_target_on_every_plant(target: float, slope: float, lambda_: float) -> None:
    law = ours(target=target)
    states = run_on_lagging_plant(law, slope, lambda_)
    error = [abs(state.error or 0.0) for state in states]
    assert max(error[-200:]) <= law.deadband
    assert states[-1].lambda_ == pytest.approx(lambda_, rel=0.08)


def test_kl_law_is_off_until_the_target_is_passed_and_holds_it() -> None:
    law = ours(form="kl", target=0.05, ki=0.05, lambda_start=0.1)
    states = run_on_lagging_plant(law, 2.0, 3.0)
    first = next(index for index, state in enumerate(states) if state.measured is not None and state.measured >= 0.05)
    assert {state.lambda_ for state in states[:first]} == {0.0} and not states[first - 1].started
    assert states[first].lambda_ == 0.1 and states[first].started
    assert max(abs(state.error or 0.0) for state in states[-200:]) <= law.deadband


def test_logit_law_waits_for_the_target_where_the_published_law_runs_to_its_bound() -> None:
    law = ours(total_updates=2000)
    held, runs = scu.build_initial_state(law), scu.build_initial_state(scu.Law(target=0.01))
    for _ in range(199):
        held, runs = scu.advance(law, held, 0.0), scu.advance(scu.Law(target=0.01), runs, 0.0)
    assert law.patience == 200 and held.lambda_ == 0.1 and runs.lambda_ < 1e-3


@pytest.mark.parametrize(
    ("target", "lambda_start", "rests_at"), [(0.02, 6.0, 0.5), (0.02, 6.0, 40.0), (0.3, 0.4, 0.01)]
)
def test_a_first_lambda_that_keeps_the_target_out_of_reach_falls_after_a_while(
    target: float, lambda_start: float, rests_at: float
) -> None:
    law = ours(target=target, lambda_start=lambda_start, total_updates=1500)
    states = run_on_lagging_plant(law, 1.0, rests_at)
    assert states[-1].started and states[-1].lambda_ == pytest.approx(rests_at, rel=0.08)
    begun = next(index for index, state in enumerate(states) if state.started)
    assert begun + 1 == 150 if rests_at < lambda_start else begun < 150


def test_kl_waits_for_ever() -> None:
    law = ours(form="kl", target=0.05, ki=0.05)
    state = scu.build_initial_state(law)
    for _ in range(500):
        state = scu.advance(law, state, 0.01)
    assert state.lambda_ == 0.0 and not state.started


def test_kl_lets_go_sooner_than_it_takes_hold() -> None:
    """8 Kp and 4 Ki below the target: by hand, for an error that stays, and for one that falls through the target."""
    law = ours(form="kl", target=0.05, kp=0.5, ki=0.1, ema=1.0)
    held = scu.ControllerState(lambda_=1.0, measured=0.1, smoothed=0.1, error=math.log(2.0))
    above = scu.advance(law, held, 0.1)
    assert math.log(above.lambda_) == pytest.approx(0.1 * 0.5)  # clipped
    below = scu.advance(law, replace(held, smoothed=0.04, error=math.log(0.8)), 0.04)
    assert math.log(below.lambda_) == pytest.approx(0.4 * math.log(0.8))
    through = scu.advance(law, held, 0.04)
    assert math.log(through.lambda_) == pytest.approx(4.0 * math.log(0.8) - 0.5 * math.log(2.0) + 0.4 * math.log(0.8))


def test_kl_recovers_from_a_useless_lambda() -> None:
    """The text is known by heart: the lambda that holds K falls by 4 % a step. K stays near its target."""
    law = ours(form="kl", target=0.05, kp=0.5, ki=0.1)
    state, level, lowest = scu.build_initial_state(law), math.log(0.01), 0.0
    for step in range(400):
        holds = 30.0 if step < 250 else 30.0 * 0.96 ** (step - 250)
        level += (math.log(0.05) - 2.0 * math.log(max(state.lambda_, 1e-3) / holds) - level) / scu.LAG_STEPS
        level = min(level, 0.0)
        state = scu.advance(law, state, math.exp(level))
        lowest = min(lowest, state.error or 0.0) if step > 250 else 0.0
    assert -0.35 < lowest < 0.0
    assert state.lambda_ < 0.3


@pytest.mark.parametrize(("kp", "ki"), [(0.5, 0.2), (0.5, 3.0), (0.0, 0.1)])
def test_gains_that_swing_are_refused(kp: float, ki: float) -> None:
    with pytest.raises(ValueError, match=rf"^ki={ki:g}: lambda oscillates increasingly with scu.kp={kp:g} "):
        ours(kp=kp, ki=ki)
    with pytest.raises(ValueError, match="ki=0: lambda would never"):
        ours(ki=0.0)


@pytest.mark.parametrize(("form", "kp", "most"), [("logit", 21.0, "20"), ("kl", 2.6, "2.5")])
def test_a_gain_that_makes_jumps_of_noise_is_refused_by_what_it_is_below_the_target(
    form: scu.Form, kp: float, most: str
) -> None:
    with pytest.raises(ValueError, match=rf"^kp={kp:g}: .*; use 0.5, or at most {most}$"):
        ours(form=form, target=0.05, kp=kp, ki=0.05)


def test_a_gain_that_makes_jumps_of_noise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^kp=200: noise of 0\.05 in the error multiplies lambda by 2\.2e\+04"):
        ours(kp=200.0)
    assert ours(kp=20.0).kp == 20.0


def test_refused_gains_do_swing() -> None:
    swinging = scu.Law(target=0.01, form="logit", controller="fixed", kp=0.5, ki=0.2, lambda_max=1e4)
    assert not scu.is_stable(swinging, scu.SLOPE["logit"])
    object.__setattr__(swinging, "controller", "pi")
    states = run_on_lagging_plant(swinging, 3.0, 33.0)
    assert max(abs(state.error or 0.0) for state in states[-200:]) > 1.0


@given(st.floats(0.0005, 0.5), st.lists(ratios, min_size=2, max_size=60), st.integers(1, 59))
def test_state_of_the_logit_law_survives_json_to_the_bit(target: float, measured: list[float], cut: int) -> None:
    law = ours(target=target)
    whole = resumed = scu.build_initial_state(law)
    for index, ratio in enumerate(measured):
        if index == cut:
            resumed = scu.ControllerState(**json.loads(json.dumps(asdict(resumed))))
        whole, resumed = scu.advance(law, whole, ratio), scu.advance(law, resumed, ratio)
        assert whole == resumed and law.lambda_min <= whole.lambda_ <= law.lambda_max
