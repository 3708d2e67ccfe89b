"""fp16 at stage 0, whose optimizer in DeepSpeed is one of its own: weights and norms know nothing of the loss scale."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.deepspeed_workarounds import loss_scaler, raise_the_loss_scale_last

GRADIENT = torch.tensor([0.3, -0.4])


@pytest.fixture
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from deepspeed import comm

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    comm.init_distributed("gloo", verbose=False)
    yield
    dist.destroy_process_group()


def optimizer_of_stage_0(weight: torch.nn.Parameter, **scaling: float) -> Any:
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    arguments = {"init_scale": 1024.0, "scale_window": 2, "min_scale": 1.0} | scaling
    return FP16_UnfusedOptimizer(
        torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False
    )


def test_every_step_is_taken_with_the_whole_gradient(one_rank: None) -> None:
    """The scale doubles after the fourth step and the sixth; SGD would show half a gradient as half a step."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = optimizer_of_stage_0(weight)
    raise_the_loss_scale_last(optimizer, scaled_norm=True)
    scales = []
    for step in range(1, 8):
        scales.append(optimizer.loss_scale)
        weight.grad = (GRADIENT * optimizer.loss_scale).half()
        optimizer.step()
        torch.testing.assert_close(weight.detach().float(), -step * GRADIENT, rtol=1e-3, atol=0)
        assert float(optimizer._global_grad_norm) == pytest.approx(0.5, rel=1e-3)
    assert max(scales) > scales[0] == 1024.0


def test_an_overflow_lowers_the_scale_and_changes_no_weight(one_rank: None) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = optimizer_of_stage_0(weight)
    raise_the_loss_scale_last(optimizer, scaled_norm=True)
    weight.grad = torch.tensor([torch.inf, 0.0], dtype=torch.float16)
    optimizer.step()
    assert optimizer.overflow and not weight.any()
    assert loss_scaler(optimizer).cur_scale == optimizer.loss_scale == 512.0
    assert loss_scaler(optimizer).last_overflow_iter == 0
    assert loss_scaler(optimizer).cur_iter == 1
