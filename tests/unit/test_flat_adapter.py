"""The flat adapter: PEFT's names and values stay, gradients arrive in one tensor, and SCU reads it without a copy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_model
from trainer.config import LoraSection
from trainer.model.adapter import GradientCheck, apply_adapter, count_parameters
from trainer.parallel.engine.flat_adapter import FlatAdapter, flatten_adapter, list_trained_parameters
from trainer.scu.information import AdapterInformation, find_pairs


def adapted(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(make_model(folder / "model", intermediate_size=129))
    model = apply_adapter(model, LoraSection(**({"r": 3} | settings)), torch.float32)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(2, 22).view(2, 10)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def flat_gradients(model: Any, flat: FlatAdapter) -> dict[str, torch.Tensor]:
    gradients: dict[str, torch.Tensor] = {}
    for name, (buffer, start, elements) in flat.list_spans().items():
        grad = flat.buffers[buffer].grad
        assert grad is not None
        gradients[name] = grad[start : start + elements]
    return gradients


@pytest.mark.parametrize("separate_up", [False, True])
def test_values_gradients_and_loss_are_those_of_separate_tensors(tmp_path: Path, separate_up: bool) -> None:
    plain, model = adapted(tmp_path), adapted(tmp_path)
    flat = flatten_adapter(model, separate_up=separate_up)
    assert flat is not None and len(flat.buffers) == 1 + separate_up
    loss_of(plain).backward()
    loss_of(model).backward()
    separate = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    gradients = flat_gradients(model, flat)
    assert gradients.keys() == separate.keys() == dict(list_trained_parameters(model)).keys()
    for name, parameter in list_trained_parameters(model):
        torch.testing.assert_close(parameter.data, separate[name].data, rtol=0, atol=0)
        # By the same operators, here into a view of the buffer: products may depend on its alignment by a rounding.
        torch.testing.assert_close(gradients[name].view_as(parameter), separate[name].grad, rtol=2.5e-7, atol=0)
    # What stands between the factors, which start at multiples of 16 bytes, never moves.
    padded = sum(buffer.numel() for buffer in flat.buffers)
    assert padded > sum(parameter.numel() for parameter in separate.values())
    assert sum(int(buffer.grad.count_nonzero()) for buffer in flat.buffers if buffer.grad is not None) <= sum(
        parameter.numel() for parameter in separate.values()
    )
    assert count_parameters(model) == count_parameters(plain)


def shares_memory(flat: FlatAdapter) -> bool:
    blocks = [(block, flat.read_block(number)) for number, block in enumerate(flat.blocks)]
    rows = [pair for block, rows in blocks for pair in zip(block.members, rows, strict=True)]
    return all(member.parameter.data_ptr() == row.data_ptr() for member, row in rows)


def test_one_update_of_the_buffer_is_an_update_of_peft_s_parameters(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    flat = flatten_adapter(model, separate_up=False)
    assert flat is not None
    loss_of(model).backward()
    before = {name: parameter.detach().clone() for name, parameter in list_trained_parameters(model)}
    torch.optim.SGD(flat.buffers, lr=1.0).step()
    gradients = flat_gradients(model, flat)
    for name, parameter in list_trained_parameters(model):
        torch.testing.assert_close(parameter.data, before[name] - gradients[name].view_as(parameter))
    assert shares_memory(flat)
    flat.buffers[0].data = flat.buffers[0].data.clone()  # what an engine does when it starts
    assert not shares_memory(flat)
    flat.repoint_parameters()
    assert shares_memory(flat)


def test_every_forward_pass_has_its_own_views_and_none_without_gradients(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    flat = flatten_adapter(model, separate_up=False)
    assert flat is not None
    with_gradients = loss_of(model)
    assert all("weight" in member.module.__dict__ for member in flat.members)
    with torch.no_grad():
        assert loss_of(model) == with_gradients.detach()
    assert all("weight" not in member.module.__dict__ for member in flat.members)
    torch.optim.SGD(flat.buffers, lr=0.1).zero_grad()
    (loss_of(model) + loss_of(model)).backward()  # two passes before one backward, as with accumulation
    assert flat.buffers[0].grad is not None and flat.buffers[0].grad.any()


def test_the_gradient_check_sees_through_the_buffer(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    flat = flatten_adapter(model, separate_up=False)
    assert flat is not None
    check = GradientCheck(model)
    loss_of(model).backward()
    check.finish()
    check = GradientCheck(model)
    with pytest.raises(RuntimeError, match=r"got no gradient \(first: .*lora_A"):
        check.finish()
    broken = flat.members[0].parameter
    broken.data[0, 0] = float("nan")
    check = GradientCheck(model)
    loss_of(model).backward()
    with pytest.raises(FloatingPointError, match="non-finite"):
        check.finish()


@pytest.mark.parametrize("measure", ["delta", "factors"])
def test_information_is_the_same_and_its_gradient_reaches_the_buffer(tmp_path: Path, measure: Any) -> None:
    plain, model = adapted(tmp_path), adapted(tmp_path)
    flat = flatten_adapter(model, separate_up=False)
    assert flat is not None
    apart = AdapterInformation(find_pairs(plain), measure, sigma=0.01, tokens=100)
    together = AdapterInformation(find_pairs(model), measure, sigma=0.01, tokens=100, flat=flat)
    assert all(chunk.flat is flat for chunk in together.chunks)
    flat.create_weight_views()
    squares = together.compute_sum_of_squares()
    torch.testing.assert_close(squares.detach(), apart.compute_sum_of_squares().detach())
    squares.backward()
    apart.compute_sum_of_squares().backward()
    gradients = flat_gradients(model, flat)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            # 32 bits; the squares of all layers are added up in one product instead of one a layer.
            torch.testing.assert_close(gradients[name].view_as(parameter), parameter.grad, rtol=1e-5, atol=0)


def test_saved_adapters_are_those_of_separate_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain, model = adapted(tmp_path), adapted(tmp_path)
    flatten_adapter(model, separate_up=False)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "flat")
    saved, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("flat", "plain"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
