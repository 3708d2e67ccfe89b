"""Which class of transformers a model is loaded as; which are not trained, which not with sdpa: by config.json."""

import inspect
from typing import Any

from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.model.mxfp4 import MXFP4
from trainer.model.stored_fp8 import fp8_form, quantization_settings

# Ends of class names in config.json that stand for another output than the next token.
OTHER_HEADS = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "RewardModel",
)


def auto_class(model_config: Any) -> Any:
    """AutoModelForMultimodalLM for a model of text and images or sound, AutoModelForCausalLM for all others.

    AutoModelForCausalLM takes some multimodal configurations for the text part alone (Qwen3.5, Llama 4), and others not
    at all (Qwen3-VL, Mistral 3). An adapter is to fit the model that the checkpoint names: the whole one, whose
    parameters have other paths.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    kind, has_parts = type(model_config), model_config.get_text_config() is not model_config
    by_text_alone = kind in AutoModelForCausalLM._model_mapping and not has_parts
    known = kind in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if known and not by_text_alone else AutoModelForCausalLM


def check_kind(base_model: str, model_config: Any, *, all_trained: bool = False) -> None:
    """Raise UserError for what is quantised already, or by config.json no causal language model.

    Weights in MXFP4 or FP8 can be the base of an adapter, but not be trained themselves (`all_trained`).
    """
    setting, kind = f"base_model={base_model}", model_config.model_type
    if model_config.is_encoder_decoder:
        raise UserError(f"{setting}: an encoder-decoder model ({kind}); only causal language models are trained")
    try:
        method = quantization_method(model_config)
    except ValueError:  # transformers, of a configuration with several texts
        raise UserError(
            f"{setting}: has several text parts ({kind}); only causal language models are trained"
        ) from None
    if method == MXFP4 and all_trained:
        raise UserError(
            f"adapter=none: the experts of {base_model} are stored in MXFP4 and cannot be trained in it; use adapter: "
            "lora or qlora, or a copy of the model in 16 bits"
        )
    is_fp8 = fp8_form(model_config) is not None
    if is_fp8 and all_trained:
        raise UserError(
            f"adapter=none: the weights of {base_model} are stored in FP8 and cannot be trained in it; use adapter: "
            "lora, or a copy of the model in 16 bits"
        )
    if method and method != MXFP4 and not is_fp8:
        raise UserError(
            f"{setting}: is already quantised ({_of_method(model_config, method)}); name the full-precision model that "
            "it was made from, with adapter: qlora for a base in 4 bits, or in 8 with quantization.quant_type: fp8 or "
            "int8"
        )
    named = (getattr(model_config, "architectures", None) or [""])[0] or ""
    if named.endswith(OTHER_HEADS):
        raise UserError(
            f"{setting}: config.json names {named}, which does not predict the next token; name a causal language model"
        )
    auto = auto_class(model_config)
    remote = getattr(model_config, "auto_map", None)
    if type(model_config) not in auto._model_mapping:
        if not remote:
            raise UserError(
                f"{setting}: transformers has no causal language model of model_type {kind}; name another model"
            )
        return
    # BERT and its relatives are causal if config.json says so; their classes ask for it.
    model_class = auto._model_mapping[type(model_config)]
    asks = "is_decoder" in inspect.getsource(model_class.__init__)
    if asks and not getattr(model_config, "is_decoder", True):
        raise UserError(
            f"{setting}: {kind} reads in both directions (is_decoder is false in config.json); only causal language "
            "models are trained"
        )


def caps_scores(model_config: Any) -> bool:
    """Whether attention scores are bent by a hyperbolic tangent, as Gemma 2's."""
    return getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None


def takes_sdpa(model: Any) -> bool:
    """Whether torch's attention gives what the model's own code gives.

    It caps no scores. transformers 5.17 says that Gemma 2 takes it, and silently leaves the cap out.
    """
    return bool(require(model, "_supports_sdpa", "transformers")) and not caps_scores(model.config)


def is_mxfp4(model_config: Any) -> bool:
    """Whether config.json says that the experts are stored in MXFP4."""
    return quantization_method(model_config) == MXFP4


def is_stored_quantised(model_config: Any) -> bool:
    """Whether weights are stored in a form of 4 or 8 bits that stays as it is."""
    return is_mxfp4(model_config) or fp8_form(model_config) is not None


def quantization_method(model_config: Any) -> str | None:
    """`bitsandbytes`, `gptq`, `awq`, `fp8`, ...: how the stored weights are quantised, or None."""
    settings = quantization_settings(model_config)
    if settings is None:
        return None
    return str(getattr(settings.get("quant_method"), "value", settings.get("quant_method") or "unknown method"))


def _of_method(model_config: Any, method: str) -> str:
    """The method, and which of its forms."""
    settings = quantization_settings(model_config) or {}
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "LLM.int8 of bitsandbytes"
    return f"{method}, {settings['format']}" if settings.get("format") else method
