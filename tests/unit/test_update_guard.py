"""Clipping and skipping within torch's fused AdamW: on the CPU, which has it as well, and on a GPU."""

import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine import adapted_engine, backward, one_rank
from trainer.config import UserError
from trainer.parallel.engine.optimizer_state import EngineState, assemble_state
from trainer.patches.deepspeed_workarounds import NORM_METHOD, UpdateGuard, check_amp_scaling_support

ON_GPU = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
MAX_NORM = 0.05
LAYOUTS = {"tensors": {}, "flat": {"flat": True}, "flat, two groups": {"flat": True, "loraplus": 8.0}}
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


def guarded(stage: int, layout: dict[str, Any], max_norm: float = MAX_NORM) -> Any:
    engine = adapted_engine("bf16", stage, DEVICE, learning_rate=1e-2, weight_decay=0.1, **layout)
    UpdateGuard(engine, max_norm)
    return engine


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that a step may change: masters, moments, the weights that the forward pass reads, the step count."""
    state = EngineState(engine)
    working = {f"working/{n}": p.detach().cpu().clone() for n, p in engine.module.named_parameters() if p.requires_grad}
    pieces = state.collect_pieces()
    assert pieces is not None
    return assemble_state([pieces]) | working | {"steps": torch.tensor(state.count_steps_taken())}


def poison(engine: Any, value: float) -> list[Any]:
    """One element of one trained tensor's gradient becomes `value`."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]

    def put(gradient: torch.Tensor) -> torch.Tensor:
        broken = gradient.clone()
        broken.view(-1)[7] = value
        return broken

    return [trained[-1].register_hook(put)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(stage: int, layout: dict[str, Any]) -> None:
    engine = guarded(stage, layout)
    backward(engine)
    engine.step()
    before = state_of(engine)
    assert before["steps"] == 1
    for value in (torch.nan, torch.inf, -torch.inf):
        handles = poison(engine, value)
        backward(engine)
        engine.step()
        assert not torch.isfinite(torch.as_tensor(engine.get_global_grad_norm()))
        for name, tensor in state_of(engine).items():
            assert torch.equal(tensor, before[name]), f"{name} changed by a gradient of {value}"
        for handle in handles:
            handle.remove()
    backward(engine)
    engine.step()
    assert state_of(engine)["steps"] == 2


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e6, 0.0])
def test_updates_are_those_of_adamw_with_clipped_gradients(stage: int, layout: dict[str, Any], max_norm: float) -> None:
    """Two steps of different size: of one alone AdamW would undo any factor."""
    engine = guarded(stage, layout, max_norm)
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    seen: dict[int, torch.Tensor] = {}
    for index, parameter in enumerate(trained):
        parameter.register_hook(lambda gradient, index=index: seen.__setitem__(index, gradient.float()))
    copies = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in trained]
    by_group = _groups_of(engine, trained)
    groups = [{**g, "params": [copies[i] for i in by_group[k]]} for k, g in enumerate(_settings(engine))]
    # The same arithmetic, without `grad_scale`: on a GPU the fused update rounds 1 - beta2 to fp32.
    reference = torch.optim.AdamW(groups, fused=True)
    assert len(trained) == sum(len(group["params"]) for group in reference.param_groups)
    clips = []
    for factor in (1.0, 0.05):
        backward(engine, factor)
        engine.step()
        norm = torch.stack([gradient.double().norm() for gradient in seen.values()]).norm()
        assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-4)
        clips.append(min(1.0, max_norm / float(norm)) if max_norm else 1.0)
        for index, copy in enumerate(copies):
            copy.grad = seen[index] * clips[-1]
        reference.step()
        _assert_same(engine, reference, copies, trained)
    if max_norm == MAX_NORM:
        assert clips[0] < 0.5 and clips[0] < clips[1], clips


def _settings(engine: Any) -> list[dict[str, Any]]:
    wanted = ("lr", "betas", "eps", "weight_decay")
    return [{name: group[name] for name in wanted} for group in engine.basic_optimizer.param_groups]


def _groups_of(engine: Any, trained: list[Any]) -> list[list[int]]:
    numbers = {id(parameter): index for index, parameter in enumerate(trained)}
    return [[numbers[id(parameter)] for parameter in group] for group in engine.optimizer.bit16_groups]


def _assert_same(engine: Any, reference: Any, copies: list[Any], trained: list[Any]) -> None:
    for parameter, copy in zip(trained, copies, strict=True):
        mapping = parameter._hp_mapping
        holder = engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        start, count = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        pairs = {"weight": (holder.detach(), copy.detach())}
        state = engine.basic_optimizer.state[holder]
        pairs |= {name: (state[name], reference.state[copy][name]) for name in ("exp_avg", "exp_avg_sq")}
        for name, (ours, wanted) in pairs.items():
            found = ours.narrow(0, start, count).view_as(wanted)
            torch.testing.assert_close(
                found,
                wanted,
                rtol=1e-4,
                atol=1e-7 * float(wanted.abs().max()),
                msg=partial("{}: {}".format, name),
            )


def test_an_optimizer_that_reads_no_norm_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    check_amp_scaling_support(torch.optim.AdamW([weight], fused=True))
    with pytest.raises(
        UserError, match=r"^torch 2\.\S+: SGD\(fused=True\) does not read `grad_scale` and `found_inf`, but"
    ):
        check_amp_scaling_support(torch.optim.SGD([weight], lr=0.1))


def test_a_norm_that_is_measured_elsewhere_ends_the_run_before_a_weight_changes() -> None:
    """As if DeepSpeed called its method by another name."""
    engine = guarded(2, {})
    delattr(engine.optimizer, NORM_METHOD)  # the instance's: DeepSpeed's own is called
    before = state_of(engine)
    backward(engine)
    with pytest.raises(UserError, match=r"^deepspeed 0\.\S+: `get_grad_norm_direct` ran for 0 of 1 groups, but"):
        engine.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(engine).items())


def test_an_update_that_passes_the_hook_by_ends_the_run_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = guarded(2, {})
    monkeypatch.setattr(engine.optimizer, "_optimizer_step", lambda group: None)
    backward(engine)
    engine.step()
    backward(engine)
    with pytest.raises(UserError, match="the optimizer did not update"):
        engine.step()


def test_a_method_that_is_gone_is_one_line() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.AdamW([weight], fused=True)
    engine = SimpleNamespace(optimizer=SimpleNamespace(), basic_optimizer=optimizer, device=DEVICE)
    with pytest.raises(UserError, match="SimpleNamespace has no `get_grad_norm_direct`, but"):
        UpdateGuard(engine, 1.0)
