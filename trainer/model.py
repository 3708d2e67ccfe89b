"""The base model and its tokenizer: what there is, checked before weights; then the weights, whole or partitioned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.layers.shards import LayerShards
from trainer.random_model import byte_tokenizer, random_config
from trainer.shapes import is_random

PAD_CANDIDATES = ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|endoftext|>", "<unk>")


def load_model_config(base_model: str, section: ModelSection) -> Any:
    """The model's configuration, from a folder, the hub's cache or the hub; UserError if it is in none of them.

    `random:SHAPE` is one of trainer/shapes.py, its weights drawn when they are loaded.
    """
    from transformers import AutoConfig

    if is_random(base_model):
        return random_config(base_model)
    folder = Path(base_model)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise UserError(f"base_model={base_model}: the folder has no config.json; name the folder of a saved model")
    return _loaded(
        "base_model",
        base_model,
        lambda: AutoConfig.from_pretrained(
            base_model, revision=section.revision or "main", trust_remote_code=section.trust_remote_code
        ),
    )


def check_weight_files(base_model: str) -> None:
    """Raise UserError if a local model has no safetensors; pickled weights could run code and are not loaded."""
    folder = Path(base_model)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise UserError(f"base_model={base_model}: no .safetensors file; only safetensors are loaded, convert it first")


def load_tokenizer(base_model: str, section: ModelSection) -> Any:
    """The tokenizer, with a padding token and the tokens of `model.added_tokens`."""
    from transformers import AutoTokenizer

    name = section.tokenizer or base_model
    if is_random(name):
        tokenizer = byte_tokenizer()
    else:
        tokenizer = _loaded(
            "model.tokenizer",
            name,
            lambda: AutoTokenizer.from_pretrained(
                name, revision=section.revision or "main", trust_remote_code=section.trust_remote_code
            ),
        )
    if hasattr(tokenizer, "legacy"):
        # transformers does not save it, and without it puts spaces elsewhere when it reads the tokenizer back.
        tokenizer.init_kwargs["legacy"] = tokenizer.legacy
    if section.added_tokens:
        tokenizer.add_tokens(list(section.added_tokens))
    _ensure_pad_token(tokenizer, section)
    return tokenizer


def _ensure_pad_token(tokenizer: Any, section: ModelSection) -> None:
    """Padding is masked by position, never by id, so any existing token will do; an unused one reads best."""
    if section.pad_token:
        if section.pad_token not in tokenizer.get_vocab():
            raise UserError(
                f"model.pad_token={section.pad_token}: not in the vocabulary; "
                "add it to model.added_tokens or name another"
            )
        tokenizer.pad_token = section.pad_token
    elif tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        tokenizer.pad_token = next((token for token in PAD_CANDIDATES if token in vocabulary), tokenizer.eos_token)
    if tokenizer.pad_token is None:
        raise UserError("model.pad_token: the tokenizer has neither a padding nor an end token; name one")


def _loaded(setting: str, name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{setting}={name}: comes with its own code; read it, then set model.trust_remote_code: true"
            ) from None
        raise UserError(
            f"{setting}={name}: not a local folder, not in the hub's cache, and the hub did not give it ({reason}); "
            "check the name, or download it where there is a network"
        ) from None


def context_length(model_config: Any) -> int | None:
    """Longest sequence the model was made for, if it says."""
    text_config = model_config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None)
    return int(length) if length else None


def load_base_model(
    base_model: str,
    section: ModelSection,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None,
    quantization: QuantizationSection | None = None,
    deepspeed_config: dict[str, Any] | None = None,
    shards: LayerShards | None = None,
) -> Any:
    """The base model in `dtype` on `device`; 4-bit if `quantization`.

    Partitioned by DeepSpeed if a stage-3 `deepspeed_config` is given, by layers if `shards` are.

    Whole models in 16 or 32 bits come through transformers. Quantised, partitioned and random ones are built empty and
    filled module by module, so that no rank ever holds more than its share and one module.
    """
    from transformers import AutoModelForCausalLM

    config = load_model_config(base_model, section)
    config.use_cache = False
    if quantization is not None or deepspeed_config is not None or shards is not None or is_random(base_model):
        from trainer.sharded_load import load_streamed  # bitsandbytes has things to say when imported

        return load_streamed(
            base_model,
            section,
            config,
            dtype=dtype,
            device=device,
            attention=attention,
            quantization=quantization,
            deepspeed_config=deepspeed_config,
            shards=shards,
        )
    model = AutoModelForCausalLM.from_pretrained(
        base_model,
        config=config,
        revision=section.revision or "main",
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=section.trust_remote_code,
        use_safetensors=True,
    )
    return model.to(device)


def grows_vocabulary(base_model: str, section: ModelSection, tokenizer: Any) -> bool:
    """True if the tokenizer has more tokens than the model has rows."""
    rows: int = load_model_config(base_model, section).get_text_config().vocab_size
    return len(tokenizer) > rows


def match_vocabulary(model: Any, tokenizer: Any) -> None:
    """Grow the embedding if the tokenizer has more tokens than the model has rows."""
    rows = model.config.get_text_config().vocab_size  # a partitioned weight has no rows to count
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)


def empty_model(model_config: Any, section: ModelSection) -> Any:
    """The model's modules without memory for their weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        return AutoModelForCausalLM.from_config(model_config, trust_remote_code=section.trust_remote_code)
