"""The controller as the loop holds it, on one process and a tiny model: order of events, resume, faults, files."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import ScuSection, UserError, load_config
from trainer.scu import law as scu
from trainer.scu.controller import ScuController, ScuError

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
TOKENS = 200


def adapted(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(TINY), lora).to(device)


def steer(model: nn.Module, total_steps: int = 10, **settings: Any) -> ScuController:
    settings = {"enabled": True, "law": "published", "target": 0.05, "sigma": 0.05, "kp": 3.0, "ki": 0.5} | settings
    section = ScuSection(**settings)
    return ScuController(section, model, target_tokens=TOKENS, total_steps=total_steps, base_parameters=1_000_000_000)


class Loop:
    """The training loop of one rank, as far as the controller sees it."""

    def __init__(self, *, rate: float = 0.01, **settings: Any) -> None:
        self.model = adapted()
        self.scu_controller = steer(self.model, **settings)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        self.lambdas: list[float] = []

    def loss_sum(self, step: int) -> tuple[Tensor, int]:
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step % 4))
        logits = self.model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), 22

    def run(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            loss_sum, tokens = self.loss_sum(step)
            loss = loss_sum / tokens + self.scu_controller.compute_penalty(step)
            self.lambdas.append(self.scu_controller.lambda_)
            loss.backward()
            self.scu_controller.observe(step, loss_sum, tokens, self.scu_controller.get_local_contribution())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {name: _copied(values) for name, values in state.items()}


def _copied(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, dict):
        return {key: _copied(value) for key, value in values.items()}
    return [_copied(value) for value in values] if isinstance(values, list) else values


@pytest.mark.parametrize(
    ("measure", "sweep"), [("delta", (1e-4, 0.01, 0.1, 1.0, 10.0)), ("factors", (1e-4, 1e-3, 0.01, 0.1, 1.0))]
)
def test_stronger_fixed_lambda_leaves_less_adapter(measure: str, sweep: tuple[float, ...]) -> None:
    left = []
    for lambda_ in sweep:
        loop = Loop(controller="fixed", lambda_start=lambda_, measure=measure)
        loop.run(1, 60)
        loop.scu_controller.apply_pending_measurement()
        assert loop.lambdas == [lambda_] * 60
        left.append(loop.scu_controller.records[-1]["param_bpt"])
    # Gaps of at least a tenth: the order is the term's doing, not noise.
    assert all(later < 0.9 * earlier for earlier, later in pairwise(left)), left


def test_s_of_a_step_steers_the_next_one() -> None:
    loop = Loop(lambda_start=1.0)
    loop.run(1, 1)
    assert loop.scu_controller.lambda_ == 1.0 and loop.scu_controller.records == []
    loop.run(2, 2)
    assert loop.lambdas[1] < 1.0, "delta starts at S = 0, below the target: lambda must fall"
    assert [record["step"] for record in loop.scu_controller.records] == [1]


def test_settling_early_gives_the_same_lambdas() -> None:
    late, early = Loop(), Loop()
    late.run(1, 6)
    for step in range(1, 7):
        early.run(step, step)
        early.scu_controller.apply_pending_measurement()
    assert early.lambdas == late.lambdas


def test_lambda_moves_at_control_steps_only() -> None:
    loop = Loop(every=3)
    loop.run(1, 10)
    moved = [later != earlier for earlier, later in pairwise(loop.lambdas)]
    assert moved == [False, False, True, False, False, True, False, False, True]
    assert [record["step"] for record in loop.scu_controller.records] == [3, 6, 9]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("cut", [1, 4, 5])
def test_resumed_run_continues_to_the_bit(tmp_path: Path, every: int, cut: int) -> None:
    whole = Loop(every=every)
    whole.run(1, 9)
    first = Loop(every=every)
    first.run(1, cut)
    state = json.loads(json.dumps(first.scu_controller.state_dict()))
    weights = first.snapshot()
    first.scu_controller.write_files(tmp_path)
    first.run(cut + 1, cut + 2)  # lost work after the checkpoint, with its records already on disk
    first.scu_controller.write_files(tmp_path)

    second = Loop(every=every)
    second.model.load_state_dict(weights["model"])
    second.optimizer.load_state_dict(weights["optimizer"])
    second.scu_controller.load_state_dict(state, step=cut, run_dir=tmp_path)
    second.run(cut + 1, 9)
    assert [value.hex() for value in second.lambdas] == [value.hex() for value in whole.lambdas[cut:]]
    whole.scu_controller.apply_pending_measurement()
    second.scu_controller.apply_pending_measurement()
    assert second.scu_controller.records == whole.scu_controller.records
    assert len(whole.scu_controller.records) == 9 // every


def test_the_pending_measurement_is_in_the_state() -> None:
    loop = Loop()
    loop.run(1, 3)
    state = loop.scu_controller.state_dict()
    assert state["pending"]["step"] == 3 and state["controller"]["updates"] == 2
    other = Loop()
    other.scu_controller.load_state_dict(state | {"pending": None}, step=3)
    other.scu_controller.apply_pending_measurement()
    loop.scu_controller.apply_pending_measurement()
    assert other.scu_controller.lambda_ != loop.scu_controller.lambda_


def test_a_step_without_target_tokens_measures_nothing() -> None:
    loop = Loop()
    loop.run(1, 1)
    loop.scu_controller.compute_penalty(2)
    loop.scu_controller.observe(2, torch.zeros(()), 0, loop.scu_controller.get_local_contribution())
    lambda_ = loop.scu_controller.lambda_
    loop.run(3, 3)
    assert loop.lambdas[-1] == lambda_ and len(loop.scu_controller.records) == 1


def test_none_measures_only() -> None:
    loop = Loop(controller="none")
    loop.run(1, 3)
    term = loop.scu_controller.compute_penalty(4)
    assert not term.requires_grad and term.item() == 0.0
    assert loop.lambdas == [0.0] * 3
    assert loop.scu_controller.records[-1]["s_ratio"] > 0
    assert "scu/target" not in loop.scu_controller.get_metrics()


@pytest.mark.parametrize("poison", ["loss", "adapter"])
def test_a_fault_stops_the_run_with_its_step(poison: str) -> None:
    loop = Loop()
    loop.run(1, 2)
    if poison == "adapter":
        next(p for n, p in loop.model.named_parameters() if "lora_B" in n).data.fill_(math.nan)
        loop.run(3, 3)
    else:
        loop.scu_controller.compute_penalty(3)
        loop.scu_controller.observe(3, torch.tensor(math.nan), 22, loop.scu_controller.get_local_contribution())
    with pytest.raises(ScuError, match="step 3 has a loss sum of"):
        loop.run(4, 4)


def test_measuring_before_the_term_is_a_fault() -> None:
    with pytest.raises(ScuError, match="before penalty"):
        steer(adapted()).get_local_contribution()


def test_metrics_have_tensorboards_names() -> None:
    loop = Loop()
    assert loop.scu_controller.get_metrics() == {"scu/lambda": 1.0, "scu/target": 0.05}
    loop.run(1, 2)
    metrics = loop.scu_controller.get_metrics()
    names = "s_ratio s_smoothed target lambda data_bpt param_bpt integral error"
    assert set(metrics) == {f"scu/{name}" for name in names.split()}
    assert metrics["scu/error"] == pytest.approx(metrics["scu/s_smoothed"] - 0.05)


def test_files(tmp_path: Path) -> None:
    loop = Loop(every=2)
    loop.run(1, 6)
    loop.scu_controller.apply_pending_measurement()
    loop.scu_controller.write_files(tmp_path)
    config, metrics, history = (
        json.loads((tmp_path / f"scu_{name}.json").read_text()) for name in ("config", "metrics", "history")
    )
    assert (config["target"], config["tokens"], config["measure"]) == (0.05, TOKENS, "delta")
    assert [record["step"] for record in metrics] == [2, 4, 6]
    published = "step ce_loss reg_loss total_loss data_bpt param_bpt s_ratio lambda integral_term error cuda_memory_mb"
    assert set(published.split()) <= set(metrics[0])
    for record, lambda_ in zip(metrics, loop.lambdas[1::2], strict=True):
        assert record["lambda"] == lambda_
        assert record["reg_loss"] == pytest.approx(lambda_ * math.log(2) * record["param_bpt"])
        assert record["total_loss"] == pytest.approx(record["ce_loss"] + record["reg_loss"])
        assert record["ce_loss"] == pytest.approx(record["data_bpt"] * math.log(2))
        assert record["s_ratio"] == pytest.approx(record["param_bpt"] / (record["data_bpt"] + record["param_bpt"]))
    assert history["lambda_history"] == loop.lambdas[1::2]
    assert history["s_ratio_history"] == [record["s_ratio"] for record in metrics]
    assert {"target_s_ratio", "peak_cuda_memory_mb", "cuda_memory_stats"} <= set(history)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("measure", "target", "rates", "reachable"),
    [
        ("delta", 0.05, [0.01] * 50, True),
        ("delta", 0.05, [1e-7] * 5, False),
        ("factors", 0.3, [0.01] * 50, True),
        ("factors", 0.01, [1e-5] * 5, False),
        ("factors", 0.9999999, [1e-5] * 5, False),
    ],
)
def test_target_outside_what_the_learning_rates_allow(
    measure: str, target: float, rates: list[float], reachable: bool
) -> None:
    scu_controller = steer(adapted(), measure=measure, target=target)
    if reachable:
        assert all("exceeds" not in warning for warning in scu_controller.check_target(6.0, rates))
        return
    with pytest.raises(UserError, match=rf"scu.target={target:g}: out of reach; .*within \[.*\]"):
        scu_controller.check_target(6.0, rates)


def test_b_of_lora_plus_reaches_further() -> None:
    scu_controller = steer(adapted(), target=0.99)
    with pytest.raises(UserError, match="out of reach"):
        scu_controller.check_target(6.0, [1e-4] * 20)
    assert not any("out of reach" in line for line in scu_controller.check_target(6.0, [1e-4] * 20, b_ratio=16.0))


def test_a_target_that_a_falling_loss_will_reach_is_not_refused() -> None:
    """S = 0.125 at the 8.5 bits of the untrained model is S = 0.55 at 1 bit: the same adapter, the same rates."""
    scu_controller = steer(adapted(), measure="factors", target=0.5, sigma=0.2)
    assert scu_controller.information is not None
    _, squares = scu_controller.information.compute_reachable_bounds(1e-4, 1e-4)
    assert (
        scu.compute_s_ratio(8.5, scu_controller.information.compute_bits(squares))
        < 0.5
        < scu.compute_s_ratio(0.1, scu_controller.information.compute_bits(squares))
    )
    assert not any("out of reach" in line for line in scu_controller.check_target(8.5, [1e-4]))


def test_a_resumed_run_warns_of_a_target_out_of_reach() -> None:
    scu_controller = steer(adapted(), measure="factors", target=0.01)
    with pytest.raises(UserError, match="out of reach"):
        scu_controller.check_target(6.0, [1e-5] * 5)
    lines = scu_controller.check_target(6.0, [1e-5] * 5, resumes=True)
    assert any("out of reach" in line for line in lines)


@pytest.mark.parametrize(
    ("before", "after", "lambda_", "said"),
    [
        ({"lambda_start": 50.0, "lambda_max": 100.0}, {"lambda_max": 10.0}, 10.0, "lambda was 50 in the checkpoint"),
        ({"controller": "none"}, {}, 1.0, "scu.controller=pi: was none"),
        ({}, {"controller": "fixed", "lambda_start": 3.0}, 3.0, "lambda was"),
        ({}, {}, None, ""),
    ],
)
def test_a_checkpoint_under_changed_settings(
    before: dict[str, Any], after: dict[str, Any], lambda_: float | None, said: str
) -> None:
    first = Loop(deadband=1.0, **before)
    first.run(1, 3)
    first.scu_controller.apply_pending_measurement()
    second = steer(adapted(), **({"deadband": 1.0} | after))
    lines = second.load_state_dict(json.loads(json.dumps(first.scu_controller.state_dict())), step=3)
    assert second.lambda_ == (first.scu_controller.lambda_ if lambda_ is None else lambda_)
    assert [said in line for line in lines] == ([True] if said else [])


def test_controllers_without_a_target_are_not_held_to_it() -> None:
    assert steer(adapted(), controller="fixed", target=0.99).check_target(6.0, [1e-9]) == []


def test_warnings_name_the_bound_and_the_floor() -> None:
    gains, floor = steer(adapted(), measure="factors", kp=50.0, target=0.1).check_target(6.0, [0.01] * 100)
    assert "exceeds 11.11 = 1/(S (1 - S))" in gains
    assert "random initialization of A" in floor


def test_auto_target_by_size_and_measure() -> None:
    assert steer(adapted(), measure="factors", target="auto").law.target == 0.01
    assert steer(adapted(), measure="delta", law="logit", target="auto", ki=0.05).law.target == 0.02


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({}, 6.0),
        ({"target": 0.01}, 12.0),
        ({"target": 1e-7}, 1e4),
        ({"target": 0.01, "lambda_max": 2.0}, 2.0),
        ({"controller": "fixed"}, 6.0),
        ({"controller": "linear"}, 0.1),
        ({"measure": "factors"}, 0.1),
        ({"measure": "kl"}, 0.1),
        ({"measure": "kl", "lambda_min": 0.5}, 0.5),
        ({"law": "published", "lambda_max": 0.05}, 0.05),
        ({"law": "published"}, 1.0),
        ({"lambda_start": 0.5}, 0.5),
    ],
)
def test_the_first_lambda_is_near_that_of_the_target(settings: dict[str, Any], start: float) -> None:
    assert ScuSection(**settings).lambda_start == pytest.approx(start)


def test_tokens_must_be_known() -> None:
    section = ScuSection(enabled=True, target=0.05)
    with pytest.raises(UserError, match=r"scu\.tokens"):
        ScuController(section, adapted(), target_tokens=None, total_steps=1, base_parameters=1)
    given = ScuSection(enabled=True, target=0.05, tokens=77)
    assert ScuController(given, adapted(), target_tokens=5, total_steps=1, base_parameters=1).tokens == 77


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("training.weight_decay=0.1", "training.weight_decay=0.1"),
        ("scu.target=0", "scu.target=0"),
        ("scu.target=1.0", "scu.target=1.0"),
        ("scu.sigma=0", "scu.sigma=0"),
        ("scu.lambda_min=1e4 scu.lambda_start=1e4", "scu.lambda_min=1e4"),
        ("scu.every=0", "scu.every=0"),
        ("adapter=none", "scu.enabled=true: the controller needs an adapter"),
        ("scu.lambda_start=2e4", "scu.lambda_start=2e4"),
        ("scu.law=published scu.target=auto", "scu.target=auto"),
        ("scu.reference=x.jsonl", "scu.reference=x.jsonl: has no effect, because scu.measure is delta"),
        ("scu.measure=kl scu.reference=x.jsonl scu.law=published", "scu.law=published"),
        ("scu.measure=kl scu.reference=x.jsonl adapter=none", "scu.enabled=true: the controller needs an adapter"),
        ("scu.measure=kl scu.reference=x.jsonl scu.target=0", "scu.target=0"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, setting: str, named: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "base_model: m\noutput_dir: out\ndataset: {path: data.jsonl}\nscu: {enabled: true, target: 0.05}\n"
        "training: {weight_decay: 0.0}\n"
    )
    load_config(path)
    with pytest.raises(UserError) as error:
        load_config(path, setting.split())
    assert str(error.value).startswith(named)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: counts synchronisations with it")
def test_a_step_never_waits_for_the_device() -> None:
    model = adapted("cuda")
    scu_controller = steer(model, check_every=10**6)
    loss_sum = torch.ones((), device="cuda", requires_grad=True)
    for step in (1, 2, 3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            (loss_sum + scu_controller.compute_penalty(step)).backward()
            scu_controller.observe(step, loss_sum.detach(), 22, scu_controller.get_local_contribution())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [record["step"] for record in scu_controller.records] == [1, 2]
