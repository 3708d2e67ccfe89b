"""Check and load the configuration, the tokenizer and the weights of the base model."""

from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.config.model_sections import RopeScaling
from trainer.contract.known_versions import replaces
from trainer.contract.standard_streams import PROGRESS
from trainer.data.sources import disable_retries_without_network
from trainer.model.model_kind import (
    SCORE_WEIGHT,
    check_kind,
    get_auto_class,
    has_score_head,
    has_soft_cap,
    is_mxfp4,
    set_score_head,
)
from trainer.model.model_source import (
    build_load_error,
    build_missing_tokenizer_error,
    check_config_file,
    check_source,
    check_tokenizer_files,
)
from trainer.model.published_shapes import is_random
from trainer.model.random_weights import build_byte_tokenizer, build_random_config, init_score_head
from trainer.model.stored_settings import find_stored_format
from trainer.model.tensor_files import SafetensorsFiles, check_finite, has_local_weights
from trainer.model.weights_fit import check_weights_fit, suppress_loading_output
from trainer.parallel.engine.layer_gather.shards import LayerShards

PAD_CANDIDATES = ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|endoftext|>", "<unk>")


def load_model_config(base_model: str, section: ModelSection) -> Any:
    """Load the model's configuration from a folder, the Hub's cache or the Hub.

    `random:SHAPE` selects an architecture from trainer/model/published_shapes.yaml. Raises UserError if the
    configuration cannot be found or read.
    """
    from transformers import AutoConfig

    if is_random(base_model):
        return _apply_overrides(base_model, section, build_random_config(base_model))
    check_source("base_model", base_model)
    disable_retries_without_network(base_model)
    check_config_file(base_model, section.revision or "main")
    try:
        config = AutoConfig.from_pretrained(
            base_model, revision=section.revision or "main", trust_remote_code=section.trust_remote_code
        )
    except Exception as error:  # configuration classes raise many kinds of errors for bad values
        raise build_load_error("base_model", base_model, error) from None
    return _apply_overrides(base_model, section, config)


def _apply_overrides(base_model: str, section: ModelSection, model_config: Any) -> Any:
    if section.has_score:
        set_score_head(base_model, model_config)
    if section.rope_scaling is not None:
        _scale_rope(section.rope_scaling, model_config.get_text_config())
    return model_config


def _scale_rope(scaling: RopeScaling, text_config: Any) -> None:
    """Set the RoPE scaling and the context length. Raises UserError unless all layers share one rotary embedding."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters or get_context_length(text_config) is None:
        problem = f"{text_config.model_type} has no single rotary embedding for all layers"
        raise UserError(f"model.rope_scaling.type={scaling.type}: {problem}; remove model.rope_scaling")
    original = scaling.original_max_position_embeddings or parameters.get("original_max_position_embeddings")
    original = original or text_config.max_position_embeddings
    unchanged = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    text_config.rope_parameters = unchanged | {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type != "linear":
        text_config.rope_parameters["original_max_position_embeddings"] = original
    if scaling.type == "llama3":
        text_config.rope_parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as in Llama 3.1
    text_config.max_position_embeddings = int(original * scaling.factor)


def check_weights(base_model: str, section: ModelSection, model_config: Any) -> list[str]:
    """Check the headers of local weight files against the model; return warnings about unused tensors.

    Raises UserError if a file is damaged or missing, or if the weights do not match the model.
    """
    if is_random(base_model) or not has_local_weights(base_model, section):
        return []
    model_class = type(build_empty_model(model_config, section))
    files = SafetensorsFiles(base_model, section)
    return check_weights_fit(f"base_model={base_model}", model_class, model_config, files)


def check_base_is_finite(base_model: str, section: ModelSection, dtype: torch.dtype) -> None:
    """Raise UserError if a stored weight is not finite or overflows in `dtype`, to explain a non-finite loss."""
    if not is_random(base_model):
        check_finite(f"base_model={base_model}", SafetensorsFiles(base_model, section), dtype)


@replaces("`legacy` in the saved settings of a tokenizer")
def load_tokenizer(base_model: str, section: ModelSection) -> Any:
    """Load the tokenizer, add the tokens in `model.added_tokens`, and set a padding token if it has none."""
    name = section.tokenizer or base_model
    tokenizer = build_byte_tokenizer() if is_random(name) else _read_tokenizer(base_model, section)
    if hasattr(tokenizer, "legacy"):
        # transformers does not save `legacy`, without which the reloaded tokenizer places spaces differently.
        tokenizer.init_kwargs["legacy"] = tokenizer.legacy
    if section.added_tokens:
        tokenizer.add_tokens(list(section.added_tokens))
    _ensure_pad_token(tokenizer, section)
    return tokenizer


def _read_tokenizer(base_model: str, section: ModelSection) -> Any:
    from transformers import AutoTokenizer

    setting, name = ("model.tokenizer", section.tokenizer) if section.tokenizer else ("base_model", base_model)
    check_source(setting, name)
    disable_retries_without_network(name)
    check_tokenizer_files(f"{setting}={name}", name, section.revision or "main")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=section.revision or "main", trust_remote_code=section.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises a plain Exception for a damaged file
        raise build_load_error(setting, name, error, tokenizer=True) from None
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # Without files, transformers builds an empty tokenizer for some models.
        raise build_missing_tokenizer_error(setting, name)
    return tokenizer


def _ensure_pad_token(tokenizer: Any, section: ModelSection) -> None:
    """Set a padding token if the tokenizer has none. Any token works, because padding is masked by position."""
    if section.pad_token:
        if section.pad_token not in tokenizer.get_vocab():
            fix = "add it to model.added_tokens or name another"
            raise UserError(f"model.pad_token={section.pad_token}: not in the vocabulary; {fix}")
        tokenizer.pad_token = section.pad_token
    elif tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        tokenizer.pad_token = next((token for token in PAD_CANDIDATES if token in vocabulary), tokenizer.eos_token)
    if tokenizer.pad_token is None:
        raise UserError("model.pad_token: the tokenizer has no padding or end token; use a token in the vocabulary")


def get_context_length(model_config: Any) -> int | None:
    """Return the model's maximum sequence length; None if it is not specified or unlimited (-1 in XLNet)."""
    length = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length and length > 0 else None


def has_rotary_positions(model_config: Any) -> bool:
    """Return whether the model uses rotary embeddings; their positions may exceed `get_context_length`."""
    return bool(getattr(model_config.get_text_config(), "rope_parameters", None))


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
    unpack: bool = False,
) -> Any:
    """Return the base model in `dtype` on `device`, quantized if `quantization` is set.

    Stored 4-bit and FP8 weights stay packed. `unpack` dequantizes them and leaves the model's configuration
    unchanged, for merging. DeepSpeed partitions the model if a stage-3 `deepspeed_config` is given. With
    `shards` the model is sharded per layer.

    transformers loads unpartitioned 16-bit and fp32 models. Quantized, partitioned and random models are built
    on the meta device and filled module by module. A rank then needs memory only for its shard and one module.
    """
    PROGRESS.show(f"loading {base_model}")
    config = load_model_config(base_model, section)
    check_kind(base_model, config, allow_score_head=section.has_score)
    config.use_cache = False
    if hasattr(config, "rescale_every") and not unpack:
        # In evaluation mode RWKV rescales the base weights in place, even packed ones, but not the adapters.
        config.rescale_every = 0
    if attention is None and has_soft_cap(config):
        attention = "eager"
    is_packed = quantization is not None or is_mxfp4(config) or find_stored_format(config) is not None
    if is_packed or deepspeed_config is not None or shards is not None or is_random(base_model):
        from transformers import GenerationConfig

        from trainer.model.streamed_weights import load_model_by_module  # imports bitsandbytes, which prints messages

        model = load_model_by_module(
            base_model, section, config, dtype=dtype, device=device, attention=attention, quantization=quantization,
            deepspeed_config=deepspeed_config, shards=shards, unpack=unpack,
        )  # fmt: skip
        if not is_random(base_model):
            with suppress(OSError):  # the model has no generation_config.json
                revision = section.revision or "main"
                model.generation_config = GenerationConfig.from_pretrained(base_model, revision=revision)
        return model
    files = SafetensorsFiles(base_model, section)
    check_weights_fit(f"base_model={base_model}", type(build_empty_model(config, section)), config, files)
    with suppress_loading_output() if has_score_head(config) else nullcontext():
        model = get_auto_class(config).from_pretrained(
            base_model,
            config=config,
            revision=section.revision or "main",
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=section.trust_remote_code,
            use_safetensors=True,
        )
    if has_score_head(config) and SCORE_WEIGHT not in files.read_shapes():
        model.score.weight.data = init_score_head(config).to(dtype)
    return model.to(device)


def resize_to_vocabulary(model: Any, tokenizer: Any) -> None:
    rows = model.config.get_text_config().vocab_size  # a partitioned weight has the shape (0,)
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)


class _EmptyOnMeta(TorchFunctionMode):
    """Redirects torch.empty to the meta device, because the experts of one layer can exceed a host's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


def build_empty_model(model_config: Any, section: ModelSection) -> Any:
    """Build the model on the meta device, with tied weights as a single parameter."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    try:
        # Skip initialization: torch's slow reference kernels would compute values that are never used.
        with no_init_weights(), _EmptyOnMeta(), init_empty_weights():
            model = get_auto_class(model_config).from_config(model_config, trust_remote_code=section.trust_remote_code)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError, ImportError,
            RuntimeError) as error:  # fmt: skip
        raise build_load_error("base_model", model_config.name_or_path, error, model_config=model_config) from error
    model.tie_weights()  # accelerate replaced each Parameter separately, which untied them
    return model


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Add NEFTune noise (arXiv:2310.05914) to embeddings [B, L, D] in training: uniform in +-alpha / sqrt(L D).

    The noise comes from torch's generator, which checkpoints restore. Passes without gradients add no noise.
    """

    def add_noise(module: Any, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return embedded
        bound = alpha / (embedded.shape[1] * embedded.shape[2]) ** 0.5
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound)

    if alpha:
        model.get_input_embeddings().register_forward_hook(add_noise)
