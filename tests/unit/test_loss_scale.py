"""fp16 at stage 0, where DeepSpeed has another optimizer: the loss scale must not reach weights and norms."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine import adapted_engine, backward, one_rank
from trainer.config import UserError
from trainer.patches.deepspeed_workarounds import delay_loss_scale, get_loss_scaler

GRADIENT = torch.tensor([0.3, -0.4])


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


def optimizer_of_stage_0(weight: torch.nn.Parameter, **scaling: float) -> Any:
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    arguments = {"init_scale": 1024.0, "scale_window": 2, "min_scale": 1.0} | scaling
    return FP16_UnfusedOptimizer(
        torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False
    )


def test_every_step_is_taken_with_the_whole_gradient() -> None:
    """The scale doubles after the fourth step and the sixth; SGD would show half a gradient as half a step."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = optimizer_of_stage_0(weight)
    delay_loss_scale(optimizer, scaled_norm=True)
    scales = []
    for step in range(1, 8):
        scales.append(optimizer.loss_scale)
        weight.grad = (GRADIENT * optimizer.loss_scale).half()
        optimizer.step()
        # The weight is fp16: 11 bits, 5e-4. Half a gradient would be half a step.
        torch.testing.assert_close(weight.detach().float(), -step * GRADIENT, rtol=1e-3, atol=0)
        assert float(optimizer._global_grad_norm) == pytest.approx(0.5, rel=1e-3)
    assert max(scales) > scales[0] == 1024.0


def test_an_overflow_lowers_the_scale_and_changes_no_weight() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = optimizer_of_stage_0(weight)
    delay_loss_scale(optimizer, scaled_norm=True)
    weight.grad = torch.tensor([torch.inf, 0.0], dtype=torch.float16)
    optimizer.step()
    assert optimizer.overflow and not weight.any()
    assert get_loss_scaler(optimizer).cur_scale == optimizer.loss_scale == 512.0
    assert get_loss_scaler(optimizer).last_overflow_iter == 0
    assert get_loss_scaler(optimizer).cur_iter == 1


def gradients(accumulation: int = 1) -> tuple[dict[str, torch.Tensor], float]:
    """Of the trained tensors after the first micro-step of fp16 at stage 0, as DeepSpeed holds them; and the scale."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    engine = adapted_engine("fp16", 0, torch.device("cpu"), **settings)
    backward(engine, 2.0**-6)
    named = engine.module.named_parameters()
    return {name: p.grad.float() for name, p in named if p.requires_grad}, float(engine.optimizer.loss_scale)


def test_the_loss_of_stage_0_is_multiplied_once_also_by_a_deepspeed_that_does_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed import DeepSpeedEngine

    exact = adapted_engine("fp32", 0, torch.device("cpu"))
    backward(exact, 2.0**-6)
    expected = {name: p.grad for name, p in exact.module.named_parameters() if p.requires_grad}
    plain: Callable[..., Any] = DeepSpeedEngine.backward

    def corrected(engine: Any, loss: torch.Tensor, **options: Any) -> Any:
        return plain(engine, loss * engine.optimizer.loss_scale, **options)

    for kind in (plain, corrected):
        monkeypatch.setattr(DeepSpeedEngine, "backward", kind)
        for accumulation in (1, 3):
            found, scale = gradients(accumulation)
            assert scale == 65536.0
            for name, gradient in found.items():
                wanted = expected[name] * scale / accumulation
                difference = float((gradient - wanted).norm() / wanted.norm())
                assert difference < 5e-3, (name, difference)  # fp16 rounds to 5e-4


def test_a_loss_that_is_multiplied_by_something_else_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import DeepSpeedEngine

    plain: Callable[..., Any] = DeepSpeedEngine.backward
    monkeypatch.setattr(DeepSpeedEngine, "backward", lambda engine, loss: plain(engine, loss * 3.0))
    with pytest.raises(UserError, match=r"engine.backward multiplies the loss by 3, not by 1 or 65536, but"):
        gradients()
