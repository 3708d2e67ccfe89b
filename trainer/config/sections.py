"""Every setting of a run, section by section; the text under a field is its documentation and its only default."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


def _checkpointing_word(value: Any) -> Any:
    """`true` and `false` are what users of other trainers type here."""
    if value in ("on", "yes", "off", "no"):
        value = value in ("on", "yes")
    if value is None or isinstance(value, bool):
        return "non_reentrant" if value else "none"
    return value


def _list_of_words(value: Any) -> Any:
    """A single word, a comma-separated line and a list all mean a list; `none` and nothing mean an empty one."""
    if value is None or value == "none":
        return []
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


# What editors are told (the JSON schema) is what is accepted, not what it becomes.
_WORDS_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "null"}]}
_CHECKPOINTING_SCHEMA = {"enum": ["none", "non_reentrant", "reentrant", True, False, None]}

Words = Annotated[tuple[str, ...], BeforeValidator(_list_of_words), WithJsonSchema(_WORDS_SCHEMA)]


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelSection(Section):
    """How the base model and its tokenizer are loaded."""

    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    tokenizer: str | None = None
    """Folder or hub name of another tokenizer than the model's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; off unless you have read that code."""
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """Attention kernel. `auto`: variable-length flash attention for packed sequences on a GPU, else sdpa."""
    added_tokens: Words = ()
    """Tokens to add to the vocabulary; their embeddings are trained and saved with the adapter."""
    pad_token: str | None = None
    """Padding token for a tokenizer that has none; by default an unused one is found, else the end-of-text token."""


class LoraSection(Section):
    """The adapter."""

    r: PositiveInt = 16
    """Rank R of the update s B A."""
    alpha: Positive = 32.0
    """Scale of the update: s = alpha / r, or alpha / sqrt(r) with `rslora`."""
    dropout: Fraction = 0.0
    """Probability with which an input element of the adapter is dropped in training."""
    target_modules: Words = ("all-linear",)
    """`all-linear` (every linear layer but the output head), or the last parts of module names, such as q_proj."""
    exclude_modules: Words = ()
    """Names that `target_modules` would match but that stay without an adapter."""
    rslora: bool = False
    """Rank-stabilised scale alpha / sqrt(r)."""
    dora: bool = False
    """Weight-decomposed adapter (DoRA): direction by LoRA, magnitude trained apart."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1.0)] | None = None
    """LoRA+: the learning rate of B is this many times that of A (16 is usual)."""
    init: Literal["default", "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora", "loftq"] = "default"
    """Start of A and B. `default`: Kaiming for A, zero for B. pissa, olora and loftq read the base and change it."""
    modules_to_save: Words = ()
    """Modules that are trained in full and saved beside the adapter, such as lm_head."""
    adapter_path: str | None = None
    """Folder or hub name of an existing adapter to start from; its own r, alpha and targets are then used."""


class QuantizationSection(Section):
    """The 4-bit base of `adapter: qlora` (bitsandbytes)."""

    bits: Literal[4] = 4
    """Bits a weight."""
    quant_type: Literal["nf4", "fp4"] = "nf4"
    """Code book of the 4-bit values."""
    double_quant: bool = True
    """Quantise the block scales as well (0.4 bits a weight less)."""
    block_size: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    """Weights that share one scale. transformers and bitsandbytes load 64 from the hub; others are made at load."""


class SourceSection(Section):
    """One source of examples."""

    path: str | None = None
    """A .jsonl, .json, .parquet, .csv, .txt file, a folder of them, or the name of a data set on the hub."""
    name: str | None = None
    """Configuration (subset) of a hub data set."""
    split: str = "train"
    """Split of a hub data set or of a folder that has splits."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "completion", "custom"] = "auto"
    """Shape of a record; `auto` reads it off the field names and says what it found."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Your names for a format's fields, such as {prompt: question, completion: answer}."""
    template: str | None = None
    """For `custom`: a prompt with {field} in it; the completion is the field `fields.completion` names."""
    weight: Positive = 1.0
    """Share of this source in a mix: 2.0 draws twice as many of its examples per example as 1.0."""
    max_samples: PositiveInt | None = None
    """Use no more than this many records of the source."""


class DatasetSection(SourceSection):
    """The text to learn, and the text held out to measure with."""

    mix: tuple[SourceSection, ...] = ()
    """Several sources instead of `path`, each with its weight."""
    evaluation: SourceSection | None = None
    """A held-out source of its own, instead of `val_split`."""
    val_split: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the records held out for evaluation."""
    max_length: PositiveInt = 2048
    """Longest sequence in tokens; longer ones are cut at the end and counted. With packing, the length of a pack."""
    packing: bool = False
    """Put several documents into one sequence, each blind to the others, positions restarting."""
    train_on: Words = ("assistant",)
    """Roles whose turns carry loss: assistant, user, system, tool, or `all`."""
    system_prompt: str | None = None
    """System turn put before conversations that have none."""
    chat_template: str | None = None
    """A Jinja chat template, or the path of a file with one, instead of the tokenizer's own."""
    streaming: bool = False
    """Read and tokenise on the fly, for sets larger than memory; needs training.max_steps."""
    shuffle: bool = True
    """A new order every epoch, drawn from `seed`."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that tokenise before training."""
    cache_dir: str = "~/.cache/zerolora/datasets"
    """Folder for tokenised data, found again by content."""


class TrainingSection(Section):
    """The loop: how long, how fast, when to look and when to save."""

    epochs: Positive = 1.0
    """Passes over the data, unless `max_steps` says otherwise; fractions are allowed."""
    max_steps: PositiveInt | None = None
    """Optimizer steps."""
    batch_size: PositiveInt = 1
    """Sequences per GPU and micro-step."""
    eval_batch_size: PositiveInt | None = None
    """Sequences per GPU in evaluation; batch_size if not given."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-steps per optimizer step. Global batch = batch_size x this x GPUs."""
    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = "cosine"
    """Course of the learning rate (transformers' schedules)."""
    min_lr_ratio: Fraction = 0.0
    """Last learning rate over the peak, for cosine_with_min_lr."""
    warmup_ratio: Fraction = 0.03
    """Share of the steps in which the learning rate rises from zero."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of warm-up, instead of `warmup_ratio`."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled decay; biases and norms are left out."""
    max_grad_norm: NonNegative = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW of torch, or of bitsandbytes with 8-bit state."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """AdamW's decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """AdamW's epsilon."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of weights and activations. `auto`: bf16 if the card has it, fp16 on older cards, fp32 on a CPU."""
    gradient_checkpointing: Annotated[
        Literal["none", "non_reentrant", "reentrant"],
        BeforeValidator(_checkpointing_word),
        WithJsonSchema(_CHECKPOINTING_SCHEMA),
    ] = "none"
    """Recompute activations in the backward pass instead of keeping them; `true` means non_reentrant."""
    save_steps: Annotated[int, Field(ge=0)] = 500
    """Steps between checkpoints; 0 saves only at the end."""
    save_total_limit: PositiveInt | None = 3
    """Newest checkpoints that are kept (the best one besides)."""
    eval_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates before and after training only."""
    logging_steps: PositiveInt = 1
    """Steps between lines of metrics."""
    resume_from_checkpoint: str | None = None
    """`latest`, the folder of a checkpoint, or `auto`: latest if there is one, else from the start."""
    early_stopping: PositiveInt | None = None
    """Stop after this many evaluations in a row without a lower held-out loss."""
    early_stopping_threshold: NonNegative = 0.0
    """By how much the held-out loss must fall to count as lower."""
    best_checkpoint: bool = False
    """Keep the checkpoint with the lowest held-out loss and end with its adapter."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite stops the run, or skips that step (at most 10 in a row)."""
    torch_compile: bool = False
    """Compile the model with torch.compile."""
    cudnn_benchmark: bool = False
    """Let cuDNN try its kernels at the start."""
    deterministic: bool = False
    """Only kernels that give the same bits every time."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the GPU's memory that this run may take."""
    timeout_minutes: Positive = 30.0
    """How long a collective waits for a rank before the run fails."""


class ZeroSection(Section):
    """DeepSpeed's ZeRO: what is partitioned over the GPUs, what is kept in host memory."""

    stage: Literal[0, 1, 2, 3] = 2
    """0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters (the base model too)."""
    offload_optimizer: bool = False
    """Optimizer state in host memory (stages 1 to 3)."""
    offload_parameters: bool = False
    """Partitioned parameters in host memory (stage 3)."""
    pin_memory: bool = True
    """Page-locked host memory for what is offloaded."""
    overlap_comm: bool = True
    """Reduce gradients while the backward pass still runs (GPU only)."""
    reduce_bucket_size: PositiveInt = 200_000_000
    """Elements per gradient reduction."""
    allgather_bucket_size: PositiveInt = 200_000_000
    """Elements per parameter gather (stages 1 and 2)."""
    prefetch_bucket_size: Annotated[int, Field(ge=0)] = 50_000_000
    """Elements that stage 3 gathers ahead of their use."""
    persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """Stage 3 keeps parameters of fewer elements than this whole on every GPU."""
    max_live_parameters: PositiveInt = 1_000_000_000
    """Elements that stage 3 keeps gathered at most."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Keys of DeepSpeed's own configuration, merged in last, for what has no setting here."""


class ScuSection(Section):
    """The Shannon Control Unit: a PI controller that holds the adapter's share of information at a target."""

    enabled: bool = False
    """Switch the controller on."""
    measure: Literal["delta", "factors"] = "delta"
    """What counts as adapter information: the effective update s B A, or the factors A and B themselves."""
    controller: Literal["pi", "fixed", "linear", "cosine", "none"] = "pi"
    """What moves lambda. `none` measures only."""
    target: Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["auto"] = "auto"
    """Share S = ParamBPT / (DataBPT + ParamBPT) to hold; `auto` is the published value by size, for `factors` only."""
    kp: NonNegative = 0.8
    """Proportional gain."""
    ki: NonNegative = 0.15
    """Integral gain."""
    deadband: NonNegative = 0.002
    """Error within which lambda stays."""
    ema: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Weight of the newest S in the smoothed one."""
    leak: Annotated[float, Field(ge=0.0, le=1.0)] = 0.995
    """Factor on the integral at every update."""
    integral_bound: Positive = 0.2
    """Largest absolute value of the integral."""
    lambda_start: Positive = 1.0
    """First lambda, and the value of `fixed`."""
    lambda_min: Positive = 1e-4
    """Smallest lambda."""
    lambda_max: Positive = 10.0
    """Largest lambda; linear and cosine end here."""
    sigma: Positive = 0.01
    """Standard deviation of the Gaussian prior on the weights."""
    every: PositiveInt = 1
    """Optimizer steps between updates of lambda."""
    tokens: PositiveInt | None = None
    """Target tokens N the information is spread over; counted from the data set unless it streams."""
    check_every: PositiveInt = 50
    """Steps between checks that lambda is the same to the bit on all ranks."""


class OpsSection(Section):
    """The arithmetic of the adapters."""

    backend: Literal["auto", "cuda", "reference", "peft"] = "auto"
    """`cuda` fused operators, `reference` the same in plain torch, `peft` PEFT's own; `auto` says what it chose."""


class LoggingSection(Section):
    """What is shown and recorded."""

    report_to: Words = ("tensorboard",)
    """tensorboard, wandb, or none. metrics.jsonl is always written."""
    run_name: str | None = None
    """Name of the run in TensorBoard and wandb; the output folder's name if not given."""
    project: str = "zerolora"
    """Project in wandb."""
    sample_prompts: tuple[str, ...] = ()
    """User messages that the model answers before and after training."""
    sample_tokens: PositiveInt = 64
    """Longest answer to a sample prompt."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """A live bar on a terminal, a line every `logging_steps` elsewhere."""


class OutputSection(Section):
    """The folder of the run."""

    overwrite: bool = False
    """Replace what an earlier run left in output_dir."""


class RunConfig(Section):
    """A whole run."""

    base_model: str
    """Folder or hub name of a Hugging Face causal language model."""
    adapter: Literal["lora", "qlora", "none"] = "lora"
    """lora: adapter on the model as it is. qlora: adapter on a 4-bit base. none: train all weights."""
    output_dir: str
    """Folder for the adapter, checkpoints, logs, metrics and plots."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of everything random."""
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    quantization: QuantizationSection = QuantizationSection()
    dataset: DatasetSection
    training: TrainingSection = TrainingSection()
    zero: ZeroSection = ZeroSection()
    scu: ScuSection = ScuSection()
    ops: OpsSection = OpsSection()
    logging: LoggingSection = LoggingSection()
    output: OutputSection = OutputSection()
