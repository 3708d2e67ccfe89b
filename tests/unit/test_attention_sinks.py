"""gpt-oss over packed documents: each as it is alone, and the correction that makes flash attention's results right."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.test_architectures import SMALL
from tests.mixtures import EXPERTS, FUSED
from trainer.patches.attention_sinks import add_sinks, compute_sink_gradient, has_sinks
from trainer.patches.packed_attention import VARLEN, use_varlen_if_supported

LENGTHS = (9, 1, 14)
CPU = torch.device("cpu")


def gpt_oss(window: int) -> Any:
    torch.manual_seed(0)
    settings = SMALL | EXPERTS | FUSED["gpt_oss"] | {"num_hidden_layers": 2, "sliding_window": window}
    config = AutoConfig.for_model("gpt_oss", **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
        elif parameter.dim() > 1:
            parameter.data *= 4.0  # weights this small would make every token as likely, whatever attention sees
    return model


@pytest.mark.parametrize("window", [4, 128])
def test_packed_documents_are_what_each_is_alone(window: int) -> None:
    model = gpt_oss(window)
    assert has_sinks(model)
    ids = torch.randint(3, 384, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    use_varlen_if_supported(model, CPU, torch.float32)
    assert model.config._attn_implementation == VARLEN
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = model(
        input_ids=ids, position_ids=positions, cu_seqlens=bounds, max_seqlen=max(LENGTHS), use_cache=False
    ).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_generation_without_bounds_is_eagers() -> None:
    model = gpt_oss(4)
    ids = torch.arange(5, 16)[None]
    found = []
    for attention in ("eager", VARLEN):
        if attention == VARLEN:
            use_varlen_if_supported(model, CPU, torch.float32)
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None))
    assert torch.equal(*found)


def test_flash_attentions_own_backward_is_exact_with_the_corrected_output_and_lse() -> None:
    """In float64 against autograd through the softmax with its sink, by the CPU's kernels of the same algorithm."""
    torch.manual_seed(0)
    heads, tokens, width = 3, 17, 8
    q, k, v = (torch.randn(1, heads, tokens, width, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(1, heads, tokens, width, dtype=torch.float64)
    scale = 1 / math.sqrt(width)
    scores = q @ k.mT * scale + torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)
    with_one_more = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, heads, tokens, 1)], dim=-1)
    truth = with_one_more.softmax(-1)[..., :-1] @ v
    expected = torch.autograd.grad(truth, (q, k, v, sinks), grad)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    plain, lse = forward(q.detach(), k.detach(), v.detach(), 0.0, True, scale=scale)
    out, lse_with = add_sinks(plain[0].transpose(0, 1), lse.reshape(heads, tokens), sinks.detach())
    torch.testing.assert_close(out.transpose(0, 1)[None], truth.detach(), rtol=1e-6, atol=1e-6)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out.transpose(0, 1)[None].contiguous(), lse_with.view(lse.shape).to(lse.dtype), 0.0, True,
        scale=scale,
    )  # fmt: skip
    for got, wanted in zip(found, expected[:3], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    of_sinks = compute_sink_gradient(grad[0].transpose(0, 1), out, lse_with, sinks.detach())
    torch.testing.assert_close(of_sinks, expected[3], rtol=1e-5, atol=1e-6)
