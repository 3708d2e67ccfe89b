"""Read model properties from config.json: the transformers class, and whether training and sdpa are supported."""

import inspect
from typing import Any

from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.model.mxfp4 import MXFP4
from trainer.model.stored_four_bit import parse_four_bit_format
from trainer.model.stored_fp8 import find_quantization_settings
from trainer.model.stored_settings import find_stored_format

SEQUENCE_CLASS = "ForSequenceClassification"
SCORE_WEIGHT = "score.weight"
"""Weight of the score head of reward models."""
# Suffixes of class names in config.json for models that do not predict the next token.
OTHER_HEADS = (
    "ForMaskedLM",
    "ForPreTraining",
    SEQUENCE_CLASS,
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "RewardModel",
)
# Model types in which tokens attend to later tokens (prefix or permutation language models).
NOT_CAUSAL = ("cpmant", "paligemma", "xlm", "xlnet")


def has_score_head(model_config: Any) -> bool:
    return bool(((getattr(model_config, "architectures", None) or [""])[0] or "").endswith(SEQUENCE_CLASS))


def set_score_head(base_model: str, model_config: Any) -> None:
    """Configure a score head with one output. Raises UserError if the base model cannot have one."""
    from transformers import AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification

    setting, kind = f"base_model={base_model}", model_config.model_type
    if has_score_head(model_config) and model_config.num_labels != 1:
        fix = "use a language model, or a reward model with num_labels 1"
        raise UserError(f"{setting}: its head has {model_config.num_labels} classes, but a reward is one number; {fix}")
    mapping = AutoModelForSequenceClassification._model_mapping
    model_class = mapping[type(model_config)] if type(model_config) in mapping else None
    if model_class is None or not issubclass(model_class, GenericForSequenceClassification):
        raise UserError(
            f"{setting}: transformers has no score head for causal language models of model_type {kind}; use a model "
            "such as Llama, Qwen or Mistral"
        )
    if model_config.get_text_config() is not model_config or find_quantization_method(model_config):
        problem = "is not text-only" if model_config.get_text_config() is not model_config else "is quantized"
        raise UserError(f"{setting}: {problem}; train the reward model from a 16-bit or fp32 text model")
    model_config.num_labels, model_config.architectures = 1, [model_class.__name__]


def find_output_layer(model: Any) -> Any:
    head = model.get_output_embeddings()
    return getattr(model, "score", None) if head is None else head


def get_auto_class(model_config: Any) -> Any:
    """Return AutoModelForMultimodalLM for models that also accept images or audio, otherwise AutoModelForCausalLM.

    For models with a score head (`set_score_head`), return AutoModelForSequenceClassification.

    AutoModelForCausalLM loads only the text part of some multimodal models (Qwen3.5, Llama 4) and rejects others
    (Qwen3-VL, Mistral 3). An adapter must match the checkpoint's full model, which has other parameter paths.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSequenceClassification

    if has_score_head(model_config):
        return AutoModelForSequenceClassification
    kind, has_parts = type(model_config), model_config.get_text_config() is not model_config
    is_text_only = kind in AutoModelForCausalLM._model_mapping and not has_parts
    is_multimodal = kind in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if is_multimodal and not is_text_only else AutoModelForCausalLM


def check_kind(
    base_model: str, model_config: Any, *, all_trained: bool = False, allow_score_head: bool = False
) -> None:
    """Raise UserError unless config.json describes a causal language model in a supported format.

    `allow_score_head` also accepts sequence classifiers. `all_trained` rejects 4-bit and FP8 weights.
    """
    setting, kind = f"base_model={base_model}", model_config.model_type
    if model_config.is_encoder_decoder:
        raise UserError(f"{setting}: is an encoder-decoder model ({kind}); use a causal language model")
    try:
        method = find_quantization_method(model_config)
    except ValueError:  # raised by get_text_config if there are several text parts
        raise UserError(f"{setting}: contains several text models ({kind}); use a causal language model") from None
    if method == MXFP4 and all_trained:
        fix = "use adapter: lora or qlora, or a 16-bit copy of the model"
        raise UserError(f"adapter=none: the experts of {base_model} are stored in MXFP4 and cannot be trained; {fix}")
    stored_format = find_stored_format(model_config)
    if stored_format is not None and all_trained:
        raise UserError(
            f"adapter=none: the weights of {base_model} are stored in {stored_format.name} and cannot be trained; use "
            "adapter: lora, or a 16-bit copy of the model"
        )
    if method and method != MXFP4 and stored_format is None:
        raise UserError(
            f"{setting}: is already quantized ({_describe_quantization(model_config, method)}); use the "
            "full-precision model it was made from, with adapter: qlora (4 bits, or 8 bits with "
            "quantization.quant_type: fp8 or int8)"
        )
    class_name = (getattr(model_config, "architectures", None) or [""])[0] or ""
    if class_name.endswith(OTHER_HEADS) and not (allow_score_head and has_score_head(model_config)):
        raise UserError(
            f"{setting}: {class_name} in config.json does not predict the next token; use a causal language model"
        )
    classes = get_auto_class(model_config)._model_mapping
    if type(model_config) not in classes:
        if not getattr(model_config, "auto_map", None):
            problem = f"transformers has no causal language model of model_type {kind}"
            raise UserError(f"{setting}: {problem}; use another model")
        return
    model_class = classes[type(model_config)]
    required = [
        name
        for name, parameter in list(inspect.signature(model_class.forward).parameters.items())[1:]
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD and name != "input_ids"
    ]
    predicts = has_score_head(model_config) or hasattr(model_class, "prepare_inputs_for_generation")
    problem = f"needs {required[0]} in every forward pass" if required else "does not generate token by token"
    if not required and predicts and kind in NOT_CAUSAL and not has_score_head(model_config):
        problem, predicts = "lets tokens attend to later tokens, so there is nothing to predict", False
    if required or not predicts:
        raise UserError(f"{setting}: {model_class.__name__} {problem}; use a causal language model")
    # BERT and similar models are causal only if config.json sets is_decoder; their classes check it.
    if "is_decoder" in inspect.getsource(model_class.__init__) and not getattr(model_config, "is_decoder", True):
        fix = "use a causal language model"
        raise UserError(f"{setting}: {kind} uses bidirectional attention (is_decoder is false in config.json); {fix}")


def has_soft_cap(model_config: Any) -> bool:
    return getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None


def supports_sdpa(model: Any) -> bool:
    """Return whether sdpa computes the same result as the model's own attention.

    sdpa has no soft cap: transformers 5.17 accepts it for Gemma 2 and silently drops the cap.
    """
    return bool(require(model, "_supports_sdpa", "transformers")) and not has_soft_cap(model.config)


def is_mxfp4(model_config: Any) -> bool:
    return find_quantization_method(model_config) == MXFP4


def find_quantization_method(model_config: Any) -> str | None:
    settings = find_quantization_settings(model_config)
    if settings is None:
        return None
    return str(getattr(settings.get("quant_method"), "value", settings.get("quant_method") or "unknown method"))


def _describe_quantization(model_config: Any, method: str) -> str:
    settings = find_quantization_settings(model_config) or {}
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "LLM.int8 of bitsandbytes"
    parts = method, settings.get("format"), parse_four_bit_format(model_config)
    return ", ".join(part for part in parts if isinstance(part, str))
