"""Experts with an adapter: the losses and the factors of plain PEFT, and the same logits from the saved files."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.test_architectures import MODELS, SMALL
from tests.distributed.test_families import EXPERTS, FAMILIES
from tests.saved_adapters import save_adapter
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import GradientCheck, apply_adapter, summarize_adapted_layers
from trainer.model.base import load_base_model
from trainer.model.eight_bit import FrozenLinear8bit
from trainer.model.expert_adapter import ParamWrapper
from trainer.model.four_bit import FrozenLinear4bit, dequantize_weight
from trainer.model.older_names import map_loaded_names
from trainer.model.packed_experts import PackedExperts
from trainer.model.saved_adapter import load_adapter
from trainer.model.targets import describe_unadapted_layers
from trainer.parallel.engine.flat_adapter import flatten_adapter

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT = FAMILIES["deepseek_v3"]
DENSE_FIRST = {"first_k_dense_replace": 1, "n_shared_experts": 1, **SHARED}
MODELS_OF: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [0]},
    "gpt_oss": FAMILIES["gpt_oss"] | {"intermediate_size": 32},
    "olmoe": EXPERTS | {"intermediate_size": 32},
    "deepseek_v3": LATENT,
    "glm4_moe": EXPERTS | DENSE_FIRST | {"head_dim": 16},
    "granitemoehybrid": MODELS["granite-moe"][1],
    "qwen3_5_moe_text": EXPERTS | SHARED | LINEAR_ATTENTION,
    "qwen3_next": EXPERTS | SHARED | LINEAR_ATTENTION,
    "qwen2_moe": EXPERTS | SHARED,
    "phimoe": EXPERTS | {"intermediate_size": 32},
    "jamba": EXPERTS | {"intermediate_size": 32, "expert_layer_offset": 0, "expert_layer_period": 1,
                        "attn_layer_offset": 0, "attn_layer_period": 2, "use_mamba_kernels": False},
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "llama4_text": EXPERTS | {"intermediate_size": 32, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 1,
                              "head_dim": 16},
    "dots1": EXPERTS | DENSE_FIRST,
    "deepseek_v2": LATENT,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1,
                               "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2, "num_shared_expert": 1, "head_dim": 16},
    "afmoe": EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 16,
                        "layer_types": ["sliding_attention", "full_attention"]},
    "flex_olmo": EXPERTS | {"intermediate_size": 32},
    "laguna": EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 32},
}  # fmt: skip
RATE, STEPS = 1e-2, 3
LORA = {"r": 4, "alpha": 8.0}
LEFT_OUT = ("the output head", "as routers do", "route tokens", "never called")


def base_of(model_type: str, **changes: Any) -> Any:
    settings = {"num_hidden_layers": 2, **SMALL, **MODELS_OF[model_type], **changes}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    return model.eval()


def saved(model: Any, folder: Path, *, moved: bool = True) -> Path:
    save_adapter(model, folder, require_nonzero_b=moved)
    return folder


def trained(model: Any, parameters: list[Any], steps: int = STEPS) -> list[float]:
    """Losses of a few steps of AdamW; the router has its own choices."""
    # An epsilon above the rounding of gradients: Adam would take its sign for a direction.
    optimizer = torch.optim.AdamW(parameters, lr=RATE, eps=1e-5)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        ids = torch.randint(3, 384, (2, 24), generator=draw)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_type", MODELS_OF)
def test_losses_and_factors_are_those_of_plain_peft(model_type: str, tmp_path: Path) -> None:
    lora = LoraSection(**LORA)
    ours = apply_adapter(base_of(model_type), lora, torch.float32)
    assert {layer.name for layer in summarize_adapted_layers(ours)} >= {"experts.gate_up_proj", "experts.down_proj"}
    assert all(any(words in line for words in LEFT_OUT) for line in describe_unadapted_layers(ours, lora))
    begin = saved(ours, tmp_path / "begin", moved=False)
    plain = PeftModel.from_pretrained(base_of(model_type), begin, is_trainable=True)
    assert not any(isinstance(module, ParamWrapper) for module in plain.modules()), "PEFT alone"
    flat = flatten_adapter(ours, separate_up=False)
    assert flat is not None
    check = GradientCheck(ours)
    found = trained(ours, flat.buffers)
    check.finish()
    expected = trained(plain, [parameter for parameter in plain.parameters() if parameter.requires_grad])
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[-1] != found[0]
    plain.save_pretrained(tmp_path / "plain")
    factors = load_file(saved(ours, tmp_path / "ours") / "adapter_model.safetensors")
    factors = {name: factors[stored] for stored, name in map_loaded_names(plain, factors).items()}
    for name, value in load_file(tmp_path / "plain" / "adapter_model.safetensors").items():
        # AdamW's first steps have the sign of a gradient, also where that is rounding.
        torch.testing.assert_close(factors[name], value, rtol=1e-3, atol=2e-5, msg=name)
    ids = torch.arange(3, 30)[None]
    again = PeftModel.from_pretrained(base_of(model_type), tmp_path / "ours").eval()
    back = load_adapter(base_of(model_type), str(tmp_path / "ours")).eval()
    with torch.no_grad():
        logits = [model(input_ids=ids, use_cache=False).logits for model in (ours.eval(), again, back)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-6, atol=1e-6)
    merged = back.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids, use_cache=False).logits, logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "fp8"])
def test_packed_experts_learn_as_their_dequantised_values_do(
    model_type: str, quant_type: Literal["nf4", "fp4", "int8", "fp8"], tmp_path: Path
) -> None:
    """FP4 and all of Llama 4 go through plain torch, the others through the operator; PEFT has the values in 32 bits.

    Linear layers in 8 bits also round their inputs, which hides faults of the experts: here they do not.
    """
    base_of(model_type, tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    packed = load_base_model(
        str(tmp_path / "base"),
        ModelSection(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention="eager",
        quantization=QuantizationSection(quant_type=quant_type),
    )
    whole = base_of(model_type, tie_word_embeddings=False)
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        for path, module in packed.named_modules():
            for name, own in module.named_parameters(recurse=False):
                if isinstance(own, PackedExperts):
                    whole.get_submodule(path).get_parameter(name).copy_(own.dequantize())
                elif isinstance(module, FrozenLinear4bit) and name == "weight":
                    values = dequantize_weight(own, module.quant_state, torch.float32)
                    whole.get_submodule(path).get_parameter(name).copy_(values)
                elif isinstance(module, FrozenLinear8bit) and name == "weight":
                    module.exact = True
                    whole.get_submodule(path).get_parameter(name).copy_(module.dequantize(torch.float32))
    tensors = sum(isinstance(each, PackedExperts) for each in packed.parameters())
    assert tensors == (2 if model_type == "qwen3_moe" else 4)
    ours = apply_adapter(packed, LoraSection(**LORA), torch.float32)
    begin = saved(ours, tmp_path / "begin", moved=False)
    plain = PeftModel.from_pretrained(whole, begin, is_trainable=True)
    found, expected = (trained(each, [p for p in each.parameters() if p.requires_grad]) for each in (ours, plain))
    assert found == pytest.approx(expected, rel=1e-5)
    factors, wanted = saved(ours, tmp_path / "ours"), saved(plain, tmp_path / "plain")
    reference = load_file(wanted / "adapter_model.safetensors")
    for name, value in load_file(factors / "adapter_model.safetensors").items():
        # As above; the losses themselves are held to 1e-5.
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=2e-5, msg=name)


def test_dropout_reaches_the_experts_and_is_off_in_evaluation(tmp_path: Path) -> None:
    ours = apply_adapter(base_of("qwen3_moe"), LoraSection(**LORA, dropout=0.5), torch.float32)
    for name, parameter in ours.named_parameters():
        if "experts" in name and "lora_B" in name:
            torch.nn.init.normal_(parameter)
        elif "lora_A" in name and "experts" not in name:
            torch.nn.init.zeros_(parameter)  # what differs comes of the experts
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        first, second = (ours.train()(input_ids=ids, use_cache=False).logits for _ in range(2))
        calm, again = (ours.eval()(input_ids=ids, use_cache=False).logits for _ in range(2))
        assert not torch.equal(first, second) and torch.equal(calm, again)
        loaded = PeftModel.from_pretrained(base_of("qwen3_moe"), saved(ours, tmp_path)).eval()
        torch.testing.assert_close(loaded(input_ids=ids, use_cache=False).logits, calm, rtol=1e-4, atol=1e-4)
    going_on = load_adapter(base_of("qwen3_moe"), str(tmp_path), trainable=True, dropout=0.5).train()
    with torch.no_grad():
        first, second = (going_on(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert not torch.equal(first, second), "an adapter from which training continues has the dropout of the settings"


@pytest.mark.parametrize("chosen", [(0, 1), (2, 2)])
def test_experts_without_tokens_and_one_with_all_of_them(chosen: tuple[int, int]) -> None:
    """The router's bias sends all tokens to the experts named; twice the same is one expert with every token."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def route(self: Any, hidden: torch.Tensor) -> Any:
        tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
        index = torch.tensor(chosen).repeat(tokens, 1)
        return hidden.new_zeros(tokens, 4), hidden.new_full((tokens, 2), 0.5), index

    lora, before = LoraSection(**LORA), Qwen3MoeTopKRouter.forward
    Qwen3MoeTopKRouter.forward = route
    try:
        ours = apply_adapter(base_of("qwen3_moe", mlp_only_layers=[]), lora, torch.float32)
        flat = flatten_adapter(ours, separate_up=False)
        assert flat is not None
        check = GradientCheck(ours)
        trained(ours, flat.buffers)
        check.finish()
    finally:
        Qwen3MoeTopKRouter.forward = before
    for name, parameter in ours.named_parameters():
        if "experts" in name and "lora_B" in name:
            moved = {expert for expert in range(4) if parameter[expert].any()}
            assert moved == set(chosen), "experts that no token came to have learned nothing"
