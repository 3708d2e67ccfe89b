"""The settings of the loop, of ZeRO and of the operators; the text under a field is its documentation."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from trainer.config.needs import Needs
from trainer.config.paths import CheckpointText
from trainer.config.types import (
    BatchSize,
    Count,
    Elements,
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Restarts,
    ResumeChanges,
    Section,
    Stage,
    StepsOrNever,
)

_CHECKPOINTING_SCHEMA = {"enum": ["auto", "none", "non_reentrant", "reentrant", "selective", True, False, None]}


def _checkpointing_word(value: Any) -> Any:
    """`true` and `false` are what users of other trainers type here."""
    if value in ("on", "yes", "off", "no"):
        value = value in ("on", "yes")
    if value is None or isinstance(value, bool):
        return "non_reentrant" if value else "none"
    return value


_ADAPTER = Needs("adapter", ("lora", "qlora"))
_WARMUP = Needs(
    ".lr_scheduler",
    ("linear", "cosine", "cosine_with_min_lr", "constant_with_warmup", "polynomial", "inverse_sqrt"),
)
_PARTITIONED, _STAGE_3, _BY_MODULE = (Needs(".stage", (1, 2, 3)), Needs(".stage", (3,)), Needs(".gather", ("module",)))
# A step's first run compiles, tunes and allocates.
FIRST_STEP_FACTOR = 3.0
TO_SPEAK_MINUTES = 5.0


class TrainingSection(Section):
    """The loop: how long, how fast, when to look and when to save."""

    epochs: Annotated[float, Field(gt=0.0, le=100_000.0)] = 1.0
    """Passes over the data, unless `max_steps` says otherwise; fractions are allowed."""
    max_steps: PositiveInt | None = None
    """Optimizer steps."""
    batch_size: BatchSize = 1
    """Sequences per GPU and micro-step; `auto` takes the most that fit by the memory estimate."""
    eval_batch_size: Annotated[Count | None, Needs("dataset.val_split dataset.evaluation")] = None
    """Sequences per GPU in evaluation; batch_size if not given."""
    gradient_accumulation_steps: Count = 1
    """Micro-steps per optimizer step. Global batch = batch_size x this x GPUs."""
    global_batch_size: BatchSize | None = None
    """Sequences per optimizer step over all GPUs, instead of gradient_accumulation_steps; batch_size is then the most
    of a micro-step. `auto`: as many as leave the run 100 steps, a power of two, 32 at most."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """Peak learning rate."""
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = "cosine"
    """Course of the learning rate (transformers' schedules)."""
    min_lr_ratio: Annotated[Fraction, Needs(".lr_scheduler", ("cosine_with_min_lr",))] = 0.0
    """Last learning rate over the peak, for cosine_with_min_lr."""
    warmup_ratio: Annotated[Fraction, _WARMUP, Needs(".warmup_steps", (None,), replaces=True)] = 0.03
    """Fraction of the steps in which the learning rate rises from zero."""
    warmup_steps: Annotated[StepsOrNever | None, _WARMUP] = None
    """Steps of warm-up, instead of `warmup_ratio`."""
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """AdamW's decoupled decay; biases and norms are left out."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e12)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    router_aux_loss: Annotated[NonNegative, Needs("task", ("language",))] = 0.0
    """Weight of the load-balancing loss of a mixture of experts, where its router is trained (0.001 to 0.02 is usual);
    it is no part of `train/loss`."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW of torch, or of bitsandbytes with 8-bit state."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """AdamW's decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-8
    """AdamW's epsilon."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of weights and activations. `auto`: bf16 if the card has it, fp16 on older cards, fp32 on a CPU."""
    qat: Annotated[Literal["int8", "int4"] | None, Needs("task", ("language",))] = None
    """Train for a server with integer weights: adapted layers compute with their merged weight W + s B A, rounded in
    every pass, and gradients pass as if it were not. int8: a scale a row; int4: one for 128 weights (64, 32). Weights
    alone are rounded. `zerolora merge --quantize` writes what was trained; needs `pip install 'zerolora[qat]'`."""
    gradient_checkpointing: Annotated[
        Literal["none", "non_reentrant", "reentrant", "selective", "auto"],
        BeforeValidator(_checkpointing_word),
        WithJsonSchema(_CHECKPOINTING_SCHEMA),
    ] = "none"
    """Recompute activations in the backward pass instead of keeping them; `true` means non_reentrant.
    `selective` keeps the attention and the frozen products' cheap neighbours and recomputes the rest. `auto`: of as few
    layers as fit by the memory estimate, none if that fits, so that no more time is spent than needed."""
    gradient_checkpointing_layers: PositiveInt | None = None
    """Only of so many decoder layers, the first ones: memory and time lie between those of none and of all. Without it
    all layers are recomputed."""
    offload_activations: bool = False
    """Keep what gradient checkpointing saves, one tensor a layer, in host memory."""
    on_oom: Literal["stop", "halve"] = "stop"
    """`halve`: a GPU out of memory halves batch_size and doubles the accumulation, up to three times, and goes on."""
    ignore_memory_check: bool = False
    """Start although the memory estimate says that it does not fit."""
    save_steps: StepsOrNever = 500
    """Steps between checkpoints; below 1 a fraction of the run; 0 saves only at the end."""
    save_minutes: NonNegative = 0.0
    """Minutes after which a checkpoint is made, beside those of `save_steps`; 0 never."""
    saves_per_epoch: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Checkpoints in each pass over the data, instead of `save_steps`."""
    save_total_limit: PositiveInt | None = 3
    """Newest checkpoints that are kept (and the best one)."""
    eval_steps: StepsOrNever = 0
    """Steps between evaluations; below 1 a fraction of the run; 0 evaluates before and after training only."""
    evals_per_epoch: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Evaluations in each pass over the data, instead of `eval_steps`."""
    logging_steps: PositiveInt = 1
    """Steps between lines of metrics."""
    resume_from_checkpoint: CheckpointText = None
    """`latest`, the folder of a checkpoint, or `auto`: latest if there is one, else from the start."""
    resume_changes: Annotated[ResumeChanges, Needs(".resume_from_checkpoint")] = ()
    """What may differ from what the checkpoint was trained with, such as [seed, data]: base_model, adapter (alpha,
    dropout, rslora, quantization, training.qat), data (and all of `dataset`), seed, batch (samples a step),
    precision, optimizer, scu."""
    early_stopping: PositiveInt | None = None
    """Stop after this many evaluations in a row without a lower held-out loss."""
    early_stopping_threshold: Annotated[NonNegative, Needs(".early_stopping")] = 0.0
    """By how much the held-out loss must fall to count as lower."""
    best_checkpoint: bool = False
    """Keep the checkpoint with the lowest held-out loss and end with its adapter."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite stops the run, or skips that step (at most 10 in a row)."""
    on_spike: Literal["warn", "ignore"] = "warn"
    """A loss far above those of the last 100 steps is warned of."""
    torch_compile: bool = False
    """Compile the model with torch.compile. It turns off what is computed together here: siblings in one call, the
    adapter in one buffer, norms, SwiGLU and rotary embedding, and does not pay where our operators run: four layers of
    Llama-3.1-8B take 109 ms a step and 19.7 GiB with it, 89 ms and 7.8 GiB without (one H100, 4 x 2048 tokens)."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Record the kernels of a micro-step and launch them as one, where the adapter is one buffer. `auto`: where the
    first steps show that the card waits for the host (small batches of small models), and playing back is faster."""
    cudnn_benchmark: bool = False
    """Let cuDNN try its kernels at the start."""
    deterministic: bool = False
    """Only kernels that give the same bits every time."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Fraction of the GPU's memory that this run may take."""
    timeout_minutes: Positive = 30.0
    """How long a collective waits for a rank before the run fails; at least 5 minutes more than 3 x hang_timeout."""
    hang_timeout: NonNegative = 10.0
    """Minutes without progress of a rank after which the run is ended and the rank named; 0 turns the watchdog off."""
    max_restarts: Restarts | None = None
    """How often `zerolora train` starts the ranks again after a failure, from the newest whole checkpoint, if a step
    was made since the last start. Where it is not given 3, but none where srun starts the ranks of a SLURM job that is
    queued again."""
    elastic: bool = False
    """Start again on the largest number of ranks left that divides the global batch, where GPUs or hosts are gone or a
    rank fails again before it made a step; the global batch stays, the accumulation grows."""
    launcher_timeout: NonNegative = 120.0
    """Seconds without a sign of the `zerolora` process after which ranks on other hosts than its own end; 0 never."""

    @model_validator(mode="before")
    @classmethod
    def _read_fractions_of_the_run(cls, given: Any) -> Any:
        """Read `eval_steps: 0.25` and `save_steps: 0.25` as transformers does: once in a quarter of the run."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        epochs, steps = given.get("epochs", 1), given.get("max_steps")
        for name, other in (("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch")):
            if isinstance(fraction := given.get(name), float) and 0.0 < fraction < 1.0:
                if isinstance(steps, int):
                    given[name] = math.ceil(fraction * steps)
                elif isinstance(epochs, (int, float)) and epochs > 0:
                    given[other] = 1 / (given.pop(name) * epochs)
        return given


def collective_timeout(training: TrainingSection) -> float:
    """Minutes after which torch gives a collective up: later than the watchdog, which can say whom it waits for."""
    if not training.hang_timeout:
        return training.timeout_minutes
    return max(training.timeout_minutes, FIRST_STEP_FACTOR * training.hang_timeout + TO_SPEAK_MINUTES)


class ZeroSection(Section):
    """DeepSpeed's ZeRO: what is partitioned over the GPUs, what is kept in host memory."""

    stage: Stage = 2
    """`auto`: the lowest that fits by the memory estimate.
    0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters (the base model too)."""
    gather: Annotated[Literal["auto", "layer", "module"], _STAGE_3] = "auto"
    """How stage 3 gathers the base. `layer`: one gather a decoder layer, a layer ahead, with the adapter whole on every
    GPU (frozen bases only). `module`: DeepSpeed's own, parameter by parameter. `auto`: layer where it can be."""
    offload_optimizer: bool = False
    """Optimizer state in host memory (stages 1 to 3)."""
    offload_parameters: bool = False
    """Partitioned parameters in host memory (stage 3)."""
    pin_memory: Annotated[bool, Needs(".offload_optimizer .offload_parameters")] = True
    """Page-locked host memory for what is offloaded."""
    overlap_comm: Annotated[bool, _PARTITIONED] = True
    """Reduce gradients while the backward pass still runs (GPU only)."""
    reduce_bucket_size: Annotated[int, Field(ge=1, le=10**11), _PARTITIONED] = 200_000_000
    """Elements per gradient reduction."""
    allgather_bucket_size: Annotated[int, Field(ge=1, le=10**11), _PARTITIONED] = 200_000_000
    """Elements per parameter gather (stages 1 and 2)."""
    prefetch_bucket_size: Annotated[Elements, _STAGE_3, _BY_MODULE] = 50_000_000
    """Elements that stage 3 gathers ahead of their use."""
    persistence_threshold: Annotated[Elements, _STAGE_3, _BY_MODULE] = 100_000
    """Stage 3 keeps parameters of fewer elements than this whole on every GPU."""
    max_live_parameters: Annotated[int, Field(ge=1, le=10**13), _STAGE_3, _BY_MODULE] = 1_000_000_000
    """Elements that stage 3 keeps gathered at most."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Keys of DeepSpeed's own configuration, merged in last, for what has no setting here."""


class OpsSection(Section):
    """The arithmetic of the adapters."""

    backend: Annotated[Literal["auto", "cuda", "reference", "peft"], _ADAPTER] = "auto"
    """`cuda` fused operators, `reference` the same in plain torch, `peft` PEFT's own; `auto` says what it chose."""
    flat: Annotated[bool, _ADAPTER] = True
    """Keep all adapter parameters of one learning rate in one buffer, so that the engine sees one tensor."""
    recompute: Annotated[Literal["activations", "norms", "none"], _ADAPTER] = "activations"
    """Cheap results that the backward pass computes again instead of keeping, where there is no gradient checkpointing:
    the activation of SwiGLU (7 of 50 GiB for 1 % of time at 8B and 8,192 tokens), with `norms` those of norms too."""
    elementwise: Literal["auto", "off"] = "auto"
    """Who computes norms, SwiGLU and rotary embedding on a GPU. `auto`: our kernels where they give what the model's
    own code gives. `off`: the model's own code."""

    @model_validator(mode="before")
    @classmethod
    def _read_records_of_earlier_versions(cls, settings: Any) -> Any:
        """Runs recorded `forget`, `liger` and Liger's kernels; in files of users config/load.py renames them."""
        if isinstance(settings, dict) and settings.keys() & {"forget", "liger", "elementwise"}:
            settings = dict(settings)
            if "forget" in settings:
                settings.setdefault("recompute", settings.pop("forget"))
            if "liger" in settings:
                settings.setdefault("elementwise", settings.pop("liger"))
            if settings.get("elementwise") in ("liger", "on"):
                settings["elementwise"] = "auto"
        return settings
