"""The settings of the base model, its adapter and its quantisation; the text under a field is its documentation."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trainer.config.needs import HUB, Needs
from trainer.config.paths import PathText
from trainer.config.types import Fraction, LayerAlphas, LayerNames, LayerRanks, Positive, Section, Words


def _every_linear(names: tuple[str, ...]) -> tuple[str, ...]:
    """`all` is LLaMA-Factory's word for it."""
    return ("all-linear",) if len(names) == 1 and names[0].lower() in ("all", "all-linear") else names


EIGHT_BIT = ("fp8", "int8")
_LANGUAGE = Needs("task", ("language",))
_NEW = Needs(".adapter_path", (None,), replaces=True)
_LANGUAGE = Needs("task", ("language",))
_FOUR_BITS = Needs(".quant_type", ("nf4", "fp4"))


class ModelSection(Section):
    """How the base model and its tokenizer are loaded."""

    revision: Annotated[str | None, Needs("base_model .tokenizer", (HUB,))] = None
    """Branch, tag or commit of the model on the hub."""
    tokenizer: Annotated[PathText | None, _LANGUAGE] = None
    """Folder or hub name of another tokenizer than the model's own."""
    trust_remote_code: Annotated[bool, _LANGUAGE] = False
    """Run Python code that comes with the model; off unless you have read that code."""
    attn_implementation: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"], _LANGUAGE
    ] = "auto"
    """Attention kernel. `auto`: variable-length flash attention for packed sequences on a GPU, else sdpa, or eager if
    the model knows nothing else."""
    added_tokens: Annotated[Words, _LANGUAGE] = ()
    """Tokens to add to the vocabulary; their embeddings are trained and saved with the adapter."""
    pad_token: Annotated[str | None, _LANGUAGE] = None
    """Padding token for a tokenizer that has none; by default an unused one is found, else the end-of-text token."""
    pipeline: Annotated[PathText | None, Needs("task", ("image",))] = None
    """Folder or hub name of the diffusers pipeline that a `base_model` in a single file belongs to, for its settings
    and tokenizers; by default the published one that the file resembles."""


class LoraSection(Section):
    """The adapter."""

    r: Annotated[int, Field(ge=1, le=32_768), _NEW] = 16
    """Rank, the width of the adapter: a higher one can learn more and takes more memory; 8 to 64 are usual."""
    alpha: Annotated[Positive, _NEW] = 32.0
    """Scale of the update s B A: s = alpha / r, or alpha / sqrt(r) with `rslora`."""
    dropout: Fraction = 0.0
    """Probability with which an input element of the adapter is dropped in training."""
    target_modules: Annotated[LayerNames, AfterValidator(_every_linear), _NEW] = ("all-linear",)
    """`all-linear` (the language model's but its output head, experts included), or the last parts of layers' names,
    such as q_proj, or regular expressions that match whole paths, as in PEFT; of experts gate_proj, w1,
    experts.*.up_proj or mlp.experts. A router gets one only by its name."""
    exclude_modules: Annotated[LayerNames, _NEW] = ()
    """What gets no adapter, nor anything below it: k_proj, mlp, layers.0, experts, or a regular expression."""
    rank_pattern: Annotated[LayerRanks, _NEW, _LANGUAGE] = Field(default_factory=dict)
    """Ranks of layers that differ from `r`, by name or regular expression, as in PEFT: {v_proj: 32}. The first match
    counts."""
    alpha_pattern: Annotated[LayerAlphas, _NEW, _LANGUAGE] = Field(default_factory=dict)
    """The same for `alpha`: {v_proj: 64}."""
    experts: Annotated[bool, _NEW] = True
    """Adapt the experts of a mixture; false leaves them out, whatever `target_modules` says."""
    expert_rank: Annotated[
        Annotated[int, Field(ge=1, le=32_768)] | Literal["r", "r/top_k"], Needs(".experts", (True,)), _NEW
    ] = "r"
    """Rank of each expert's adapter. `r`: as every other layer has it, which is what PEFT's target_parameters and
    Unsloth do. `r/top_k`: divided by the experts that a token visits, so that a token meets r in all; less memory."""
    target_parameters: Annotated[Words, _NEW] = ()
    """Further weights to adapt that are no layers, by the last parts of their names, as PEFT has it."""
    rslora: Annotated[bool, _NEW] = False
    """Rank-stabilised scale alpha / sqrt(r)."""
    dora: Annotated[bool, _NEW] = False
    """Weight-decomposed adapter (DoRA): direction by LoRA, magnitude trained apart."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1.0, le=1e4)] | None = None
    """LoRA+: the learning rate of B is this many times that of A (16 is usual)."""
    init: Literal["default", "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora", "loftq"] = "default"
    """Start of A and B. `default`: Kaiming for A, zero for B. pissa, olora and loftq read the base and change it."""
    modules_to_save: Annotated[Words, _NEW] = ()
    """Modules that are trained in full and saved beside the adapter, such as lm_head."""
    adapter_path: PathText | None = None
    """Folder or hub name of an existing adapter to start from; its own r, alpha and targets are then used."""
    allow_mismatch: Annotated[bool, Needs(".adapter_path")] = False
    """Start from the adapter at `adapter_path` although it was trained on another base model."""


class QuantizationSection(Section):
    """The quantised base of `adapter: qlora`: 4 bits by bitsandbytes, or 8 bits whose products are 8-bit products."""

    bits: Literal[4, 8] = 4
    """Bits a weight; `quant_type` alone says it too."""
    quant_type: Literal["nf4", "fp4", "fp8", "int8"] = "nf4"
    """nf4, fp4: 4 bits, dequantised for each product. fp8 (Hopper, Ada): 8 bits and the fastest steps, W and its input
    in e4m3 with a scale for each row and token. int8: the same in int8, from compute capability 7.5 on."""
    double_quant: Annotated[bool, _FOUR_BITS] = True
    """4 bits: quantise the block scales as well (0.4 bits a weight less)."""
    block_size: Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], _FOUR_BITS] = 64
    """4 bits: weights that share one scale. transformers and bitsandbytes load 64 from the hub; others are made at
    load."""

    @property
    def eight_bit(self) -> bool:
        """Whether the base has 8 bits."""
        return self.quant_type in EIGHT_BIT

    @model_validator(mode="before")
    @classmethod
    def _bits_of_type(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("quant_type") in EIGHT_BIT and "bits" not in given:
            return given | {"bits": 8}
        return given
