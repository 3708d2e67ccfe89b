"""Define the model, adapter and quantization settings. A field's docstring is its user documentation."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from trainer.config.needs import HUB, LANGUAGE, Needs
from trainer.config.paths import PathText
from trainer.config.types import (
    Fraction,
    LayerAlphas,
    LayerNames,
    LayerRanks,
    Positive,
    PositiveInt,
    Section,
    StringList,
)


def _normalize_all_linear(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("all-linear",) if len(names) == 1 and names[0].lower() in ("all", "all-linear") else names


EIGHT_BIT = ("fp8", "int8")
_WITHOUT_ADAPTER_PATH = Needs(".adapter_path", (None,), replaces=True)
_NEW_ADAPTER = Needs("lora.adapter_path", (None,))
_FOUR_BITS = Needs(".quant_type", ("nf4", "fp4"))


class RopeScaling(Section):
    """Scaling of the rotary embedding, to train a model on longer sequences than in pre-training."""

    type: Literal["linear", "yarn", "llama3"]
    """How frequencies are scaled: all equally (linear), or low frequencies more (yarn, llama3)."""
    factor: Annotated[float, Field(gt=1.0, le=1024.0)]
    """New context length as a multiple of the original length."""
    original_max_position_embeddings: PositiveInt | None = None
    """Context length in pre-training; default: the value in the model's own scaling, else max_position_embeddings."""


class ModelSection(Section):
    """The base model and its tokenizer."""

    revision: Annotated[str | None, Needs("base_model .tokenizer", (HUB,))] = None
    """Branch, tag or commit of the model on the Hub."""
    tokenizer: Annotated[PathText | None, LANGUAGE] = None
    """Folder or Hub ID of a tokenizer to use instead of the model's."""
    trust_remote_code: Annotated[bool, LANGUAGE] = False
    """Run Python code that comes with the model; only set this if you have read the code."""
    attn_implementation: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"], LANGUAGE
    ] = "auto"
    """Attention kernel. `auto`: variable-length flash attention for packed sequences on a GPU, else sdpa, or eager if
    the model supports nothing else."""
    rope_scaling: Annotated[RopeScaling | None, LANGUAGE] = None
    """Scale the rotary embedding for sequences longer than the model's, for example {type: yarn, factor: 4}; replaces
    the model's own scaling. Merged models store it in config.json."""
    added_tokens: Annotated[StringList, LANGUAGE] = ()
    """Tokens to add to the vocabulary; their embeddings are trained and saved with the adapter."""
    pad_token: Annotated[str | None, LANGUAGE] = None
    """Padding token for a tokenizer without one; default: an unused token, else the end-of-text token."""
    pipeline: Annotated[PathText | None, Needs("task", ("image",))] = None
    """Folder or Hub ID of a diffusers pipeline with the settings and tokenizers for a single-file `base_model`;
    default: the published pipeline that the file matches."""
    _has_score: bool = PrivateAttr(default=False)

    @property
    def has_score(self) -> bool:
        """Whether a score head replaces the model's output head, for `task: reward`."""
        return self._has_score


class LoraSection(Section):
    """The LoRA adapter."""

    r: Annotated[int, Field(ge=1, le=32_768), _WITHOUT_ADAPTER_PATH] = 16
    """Rank of the adapter: higher ranks can learn more and take more memory; 8 to 64 are usual."""
    alpha: Annotated[Positive, _WITHOUT_ADAPTER_PATH] = 32.0
    """Scale of the update s B A: s = alpha / r, or alpha / sqrt(r) with `rslora`."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapter's input."""
    target_modules: Annotated[LayerNames, AfterValidator(_normalize_all_linear), _WITHOUT_ADAPTER_PATH] = (
        "all-linear",
    )
    """`all-linear` (all linear layers of the language model including experts, except the output head), or the last
    parts of layer names, such as q_proj, or regular expressions that match whole paths, as in PEFT; for experts
    gate_proj, w1, experts.*.up_proj or mlp.experts. A router is adapted only if it is named."""
    exclude_modules: Annotated[LayerNames, _WITHOUT_ADAPTER_PATH] = ()
    """Modules without adapters, including all layers below them: k_proj, mlp, layers.0, experts, or a regular
    expression."""
    rank_pattern: Annotated[LayerRanks, _WITHOUT_ADAPTER_PATH, LANGUAGE] = Field(default_factory=dict)
    """Ranks other than `r`, by layer name or regular expression, as in PEFT: {v_proj: 32}. The first match wins."""
    alpha_pattern: Annotated[LayerAlphas, _WITHOUT_ADAPTER_PATH, LANGUAGE] = Field(default_factory=dict)
    """Values other than `alpha`, in the same format: {v_proj: 64}."""
    experts: Annotated[bool, _WITHOUT_ADAPTER_PATH] = True
    """Adapt the experts of an MoE model; false excludes them, regardless of `target_modules`."""
    expert_rank: Annotated[
        Annotated[int, Field(ge=1, le=32_768)] | Literal["r", "r/top_k"],
        Needs(".experts", (True,)),
        _WITHOUT_ADAPTER_PATH,
    ] = "r"
    """Rank of each expert's adapter. `r`: as for other layers, like PEFT's target_parameters and Unsloth. `r/top_k`:
    r divided by the number of experts per token, so that each token uses a total rank of r; uses less memory."""
    target_parameters: Annotated[StringList, _WITHOUT_ADAPTER_PATH] = ()
    """Additional parameters to adapt that are not layers, by the last parts of their names, as in PEFT."""
    rslora: Annotated[bool, _WITHOUT_ADAPTER_PATH] = False
    """Rank-stabilized scale alpha / sqrt(r)."""
    dora: Annotated[bool, _WITHOUT_ADAPTER_PATH] = False
    """Weight-decomposed adapter (DoRA): direction by LoRA, magnitude trained separately."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1.0, le=1e4)] | None = None
    """LoRA+: ratio of the learning rates of B and A (16 is usual)."""
    init: Literal["default", "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora", "loftq"] = "default"
    """Initialization of A and B. `default`: Kaiming for A, zero for B. pissa, olora and loftq read and change the base
    model's weights."""
    modules_to_save: Annotated[StringList, _WITHOUT_ADAPTER_PATH] = ()
    """Modules that are trained in full and saved with the adapter, such as lm_head."""
    adapter_path: PathText | None = None
    """Folder or Hub ID of an existing adapter to start from; its r, alpha and targets are then used."""
    allow_mismatch: Annotated[bool, Needs(".adapter_path")] = False
    """Start from the adapter at `adapter_path` even if it was trained on another base model."""
    _image_parts: Literal["none", "projector", "lora"] = PrivateAttr(default="none")

    @property
    def image_parts(self) -> str:
        """Parts of the vision model to train, copied from `vision.train`."""
        return self._image_parts


class VisionSection(Section):
    """Training on images in conversations, for vision-language models."""

    train: Annotated[Literal["none", "projector", "lora"], Needs("adapter", ("lora", "qlora")), _NEW_ADAPTER] = "none"
    """Parts to train in addition to the language model. `projector`: all weights of the layers that map image features
    to embeddings. `lora`: adapters on layers of the vision tower and projector that match `lora.target_modules`."""
    cache: bool = False
    """Compute the features of all images before training and keep them in `dataset.cache_dir`, so that steps are as
    fast as for text. Needs 2 H bytes per image token in bf16, where H is the language model's hidden size."""


class QuantizationSection(Section):
    """Quantization of the base model for `adapter: qlora`: 4-bit with bitsandbytes, or 8-bit with 8-bit matmuls."""

    bits: Literal[4, 8] = 4
    """Bits per weight; default: as implied by `quant_type`."""
    quant_type: Literal["nf4", "fp4", "fp8", "int8"] = "nf4"
    """nf4, fp4: 4-bit, dequantized for each matmul. fp8 (Hopper, Ada): 8-bit, with the fastest steps; W and its input
    are in e4m3, scaled per row and per token. int8: the same in int8, for compute capability 7.5 or higher."""
    double_quant: Annotated[bool, _FOUR_BITS] = True
    """4-bit only: also quantize the block scales (saves 0.4 bits per weight)."""
    block_size: Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], _FOUR_BITS] = 64
    """4-bit only: number of weights per scale. Pre-quantized models on the Hub use 64; for other sizes, weights are
    quantized when they are loaded."""

    @property
    def is_8bit(self) -> bool:
        """Whether the base model is quantized to 8 bits."""
        return self.quant_type in EIGHT_BIT

    @model_validator(mode="before")
    @classmethod
    def _infer_bits(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("quant_type") in EIGHT_BIT and "bits" not in settings:
            return settings | {"bits": 8}
        return settings
