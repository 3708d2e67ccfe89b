"""Find the adapted layers that an inference server does not apply.

Such a server would not reproduce the trained model. The lists are based on tests with vLLM 0.32
(tests/servers/test_vllm.py) and on SGLang's source.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from trainer.config import LoraSection
from trainer.model.expert_layers import find_expert_modules
from trainer.model.expert_targets import find_other_parameters
from trainer.model.targets import find_layers_to_adapt

SERVER_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "gguf-lora": "llama.cpp", "llama.cpp": "llama.cpp"}
VLLM_ROUTER_MODEL_TYPES = ("mixtral", "gpt_oss")
"""Model types for which vLLM calls the router; in other models, MoE code reads its weight and skips the adapter."""
SGLANG_LORA_LAYERS = frozenset(
    "q_proj k_proj v_proj qkv_proj o_proj out_proj gate_proj up_proj gate_up_proj down_proj q_a_proj q_b_proj "
    "kv_a_proj_with_mqa kv_b_proj in_proj in_proj_q in_proj_k in_proj_v in_proj_z in_proj_qkv in_proj_qkvz "
    "lm_head".split()
)
"""Last path components of the layers to which SGLang applies adapters (python/sglang/srt/lora/utils.py)."""


def find_unapplied_layers(server: str, model_type: str, layers: Iterable[str]) -> list[str]:
    """Return the last path components of the adapted layers for which the server ignores the adapter."""
    names = {layer.rpartition(".")[2] for layer in layers}
    if server == "sglang":
        return sorted(names - SGLANG_LORA_LAYERS)
    ignored = {"shared_expert_gate"} | ({"gate", "router"} if model_type not in VLLM_ROUTER_MODEL_TYPES else set())
    return sorted(names & ignored) if server == "vllm" else []


def describe_exclusion(name: str) -> str:
    if name in ("gate", "router"):
        return f"remove {name} from lora.target_modules and lora.target_parameters"
    return "set lora.experts: false" if name == "experts" else f"set lora.exclude_modules: [{name}]"


def list_serving_warnings(target: str | None, lora: LoraSection, added_tokens: Sequence[str], model: Any) -> list[str]:
    """Return a warning for each part of the adapter that the server `target` ignores.

    The model may be on the meta device. Ollama serves the merged model, so it ignores nothing.
    """
    if target is None or target == "ollama":
        return []
    server = SERVER_NAMES[target]
    settings = {
        "lora.dora": lora.dora,
        "lora.modules_to_save": lora.modules_to_save,
        "the weights trained by vision.train": lora.image_parts != "none",
        "model.added_tokens": added_tokens,
    }
    warnings = [f"export.target={target}: {server} does not apply {name};" for name, value in settings.items() if value]
    if lora.adapter_path is None:
        layers = [*find_layers_to_adapt(model, lora)]
        layers += [path.removesuffix(".weight") for path in find_other_parameters(model, lora)]
        names = find_unapplied_layers(target, model.config.get_text_config().model_type, layers)
        if target == "llama.cpp" and lora.experts and find_expert_modules(model):
            names = ["experts"]
        warnings += [
            f"export.target={target}: {server} does not apply adapters of {name}; {describe_exclusion(name)}, or"
            for name in names
        ]
    return [f"{warning} serve the merged model (zerolora export --format hf)" for warning in warnings]
