"""Define settings for training, ZeRO and the operators. A field's docstring is its user documentation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from trainer.config.aliases import read_table
from trainer.config.needs import LANGUAGE, Needs
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

FRACTION_SETTINGS = {"eval_steps": "evals_per_epoch", "save_steps": "saves_per_epoch"}
"""Settings in steps that accept a fraction of the run -> the setting that replaces them without max_steps."""
_CHECKPOINTING_SCHEMA = {"enum": ["auto", "none", "non_reentrant", "selective", True, False, None]}


@dataclass(frozen=True)
class OptimizerKind:
    """A value of `training.optimizer`, as described in optimizers.yaml."""

    path: str
    state: Sequence[str]
    bits: int = 32
    needs_matrices: bool = False
    takes: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """Package that contains the optimizer class."""
        return self.path.partition(".")[0]


OPTIMIZERS = {
    name: OptimizerKind(row.pop("class"), **row)
    for name, row in read_table(Path(__file__).with_name("optimizers.yaml")).items()
}


def _parse_checkpointing(value: Any) -> Any:
    if value in ("on", "yes", "off", "no"):
        value = value in ("on", "yes")
    if value is None or isinstance(value, bool):
        return "non_reentrant" if value else "none"
    return "non_reentrant" if value == "reentrant" else value  # the same result, but slower


def _check_shard_within(value: Any) -> Any:
    """Raise ValueError unless the value is `auto`, `host`, `all` or an integer (or its string) of at least 2."""
    if value in ("auto", "host", "all") or (str(value).isdigit() and int(str(value)) > 1):
        return value
    raise ValueError("must be auto, host, all, or a number of ranks of at least 2")


_ADAPTER = Needs("adapter", ("lora", "qlora"))
_WARMUP = Needs(
    ".lr_scheduler",
    (
        "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "warmup_stable_decay", "constant_with_warmup",
        "polynomial", "inverse_sqrt",
    ),
)  # fmt: skip
_ADAMS = ("adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "schedule_free_adamw")
_EPSILON = Needs(".optimizer", _ADAMS)
_BETAS = Needs(".optimizer", (*_ADAMS, "lion", "lion_8bit", "paged_lion_8bit"))
_PARTITIONED, _STAGE_3, _BY_MODULE = (Needs(".stage", (1, 2, 3)), Needs(".stage", (3,)), Needs(".gather", ("module",)))
# The first step also compiles, tunes and allocates.
FIRST_STEP_FACTOR = 3.0
REPORT_MINUTES = 5.0


class TrainingSection(Section):
    """The training loop: duration, batch, optimizer, evaluations and checkpoints."""

    epochs: Annotated[float, Field(gt=0.0, le=100_000.0)] = 1.0
    """Passes over the data, unless `max_steps` is given; fractions are allowed."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps, instead of `epochs`."""
    batch_size: BatchSize = 1
    """Sequences per GPU and micro-step; `auto`: as many as the memory estimate allows."""
    eval_batch_size: Annotated[Count | None, Needs("dataset.val_split dataset.evaluation evaluation.tasks")] = None
    """Sequences per GPU in evaluation; default: batch_size."""
    gradient_accumulation_steps: Count = 1
    """Micro-steps per optimizer step. Global batch = batch_size x this x GPUs."""
    global_batch_size: BatchSize | None = None
    """Sequences per optimizer step over all GPUs, instead of gradient_accumulation_steps; batch_size is then the
    maximum per micro-step. `auto`: the largest power of two up to 32 that leaves at least 100 steps."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """Peak learning rate."""
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "warmup_stable_decay", "constant",
        "constant_with_warmup", "polynomial", "inverse_sqrt",
    ] = "cosine"  # fmt: skip
    """Learning rate schedule, named as in transformers."""
    min_lr_ratio: Annotated[Fraction, Needs(".lr_scheduler", ("cosine_with_min_lr", "warmup_stable_decay"))] = 0.0
    """Final learning rate as a fraction of the peak, for cosine_with_min_lr and warmup_stable_decay."""
    lr_cycles: Annotated[PositiveInt, Needs(".lr_scheduler", ("cosine_with_restarts",))] = 1
    """Number of cosine_with_restarts cycles; the learning rate falls to zero in each."""
    decay_ratio: Annotated[Fraction, Needs(".lr_scheduler", ("warmup_stable_decay",))] = 0.1
    """Fraction of the steps, at the end, in which warmup_stable_decay lowers the learning rate (as a cosine)."""
    warmup_ratio: Annotated[Fraction, _WARMUP, Needs(".warmup_steps", (None,), replaces=True)] = 0.03
    """Fraction of the steps used for warm-up, in which the learning rate rises from zero."""
    warmup_steps: Annotated[StepsOrNever | None, _WARMUP] = None
    """Number of warm-up steps, instead of `warmup_ratio`."""
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Decoupled weight decay; not applied to biases and norms."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e12)] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    router_aux_loss: Annotated[NonNegative, LANGUAGE] = 0.0
    """Weight of the load-balancing loss of an MoE model with a trained router (0.001 to 0.02 is usual); not part of
    `train/loss`."""
    loss: Annotated[Literal["nll", "dft", "eaft", "focal", "label_smoothing"], Needs("task", ("language",))] = "nll"
    """Loss of a token with probability p. `nll`: -ln p. `dft`: -ln p times p, without its gradient (dynamic
    fine-tuning). `eaft`: -ln p times (H / 3)^eaft_alpha, with H the entropy in nats of the 20 most probable tokens
    (entropy-adaptive fine-tuning, as LLaMA-Factory computes it). `focal`: -(1 - p)^focal_gamma ln p.
    `label_smoothing`: cross-entropy with a fraction of the target spread over all tokens. Held-out loss is always
    -ln p."""
    eaft_alpha: Annotated[NonNegative, Needs(".loss", ("eaft",))] = 1.0
    """Exponent of the entropy in `loss: eaft`."""
    focal_gamma: Annotated[NonNegative, Needs(".loss", ("focal",))] = 2.0
    """Exponent of 1 - p in `loss: focal`."""
    label_smoothing: Annotated[float, Field(gt=0.0, lt=1.0), Needs(".loss", ("label_smoothing",))] = 0.1
    """Fraction of the target that `loss: label_smoothing` spreads evenly over the vocabulary."""
    neftune_noise_alpha: Annotated[NonNegative, Needs("task", ("language",))] = 0.0
    """Add uniform noise to the input embeddings in training, of at most this value divided by the square root of row
    length x hidden size (NEFTune; 5 is usual); 0: no noise."""
    optimizer: Literal[
        "adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion", "lion_8bit", "paged_lion_8bit",
        "adafactor", "muon", "schedule_free_adamw",
    ] = "adamw"  # fmt: skip
    """torch's AdamW, or an optimizer from bitsandbytes (`_8bit`: with 8-bit state; `paged_`: with state that moves to
    host memory when a GPU is full; `lion`), from torch at zero.stage 0 (`adafactor`; `muon`, with updates scaled for
    AdamW's learning rates), or from schedulefree (`schedule_free_adamw`: evaluates and saves averaged weights; needs a
    constant lr_scheduler and `pip install schedulefree`)."""
    adam_beta1: Annotated[Fraction, _BETAS] = 0.9
    """Decay of the first moment of AdamW and Lion."""
    adam_beta2: Annotated[Fraction, _BETAS] = 0.999
    """Decay of AdamW's second moment, or of Lion's moment."""
    adam_epsilon: Annotated[float, Field(gt=0.0, le=1.0), _EPSILON] = 1e-8
    """AdamW's epsilon."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type of weights and activations. `auto`: bf16 if the GPU supports it, else fp16; fp32 on a CPU."""
    qat: Annotated[Literal["int8", "int4"] | None, LANGUAGE] = None
    """Quantization-aware training for integer weights: adapted layers compute with their merged weight W + s B A,
    rounded in every pass, with straight-through gradients. int8: one scale per row; int4: per 128, 64 or 32 weights.
    Activations are not rounded. `zerolora merge --quantize` writes the rounded weights; needs
    `pip install torchao compressed-tensors`."""
    gradient_checkpointing: Annotated[
        Literal["none", "non_reentrant", "selective", "auto"],
        BeforeValidator(_parse_checkpointing),
        WithJsonSchema(_CHECKPOINTING_SCHEMA),
    ] = "none"
    """Recompute activations in the backward pass instead of keeping them; `true` means non_reentrant. `selective` keeps
    all activations except those inside feed-forward parts (MLPs). `auto`: recompute as few layers as
    the memory estimate requires."""
    gradient_checkpointing_layers: PositiveInt | None = None
    """Recompute only the first N decoder layers, for a memory use and speed between `none` and all layers. Default: all
    layers."""
    offload_activations: bool = False
    """Keep the tensors saved by gradient checkpointing, one per layer, in host memory; tensors that do not fit there
    stay on the GPU."""
    tiled_mlp: Annotated[PositiveInt | bool | Literal["auto"], LANGUAGE] = "auto"
    """Compute gated MLPs in tiles of this many tokens, so that memory does not grow with sequence length; true: 8,192.
    `auto`: for at least 32,768 tokens per micro-step, with gradient checkpointing and without dropout."""
    recompute_attention: Annotated[bool, LANGUAGE] = True
    """Whether recomputed layers also recompute attention; false keeps its output and log-sum-exp, stored where the
    layers' inputs are."""
    on_oom: Literal["stop", "halve"] = "stop"
    """`halve`: when a GPU runs out of memory, restart from the newest checkpoint with half the batch_size and twice the
    accumulation, up to three times."""
    ignore_memory_check: bool = False
    """Start even if the memory estimate exceeds the available memory."""
    save_steps: StepsOrNever = 500
    """Steps between checkpoints; below 1: a fraction of the run; 0: only at the end."""
    save_minutes: NonNegative = 0.0
    """Minutes between checkpoints that are saved in addition to those from `save_steps`; 0: never."""
    saves_per_epoch: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Checkpoints per pass over the data, instead of `save_steps`."""
    save_total_limit: PositiveInt | None = 3
    """Number of newest checkpoints to keep (in addition to the best one)."""
    eval_steps: StepsOrNever = 0
    """Steps between evaluations; below 1: a fraction of the run; 0: only before and after training."""
    evals_per_epoch: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Evaluations per pass over the data, instead of `eval_steps`."""
    logging_steps: PositiveInt = 1
    """Steps between logged metrics."""
    resume_from_checkpoint: CheckpointText = None
    """Checkpoint to resume: `latest`, a folder, or `auto` (the latest if one exists, otherwise start from scratch)."""
    resume_changes: Annotated[ResumeChanges, Needs(".resume_from_checkpoint")] = ()
    """Settings that may differ from the checkpoint's, such as [seed, data]: base_model, adapter (alpha, dropout,
    rslora, quantization, training.qat), data (and all of `dataset`), seed, batch (samples per step), precision,
    optimizer, scu."""
    early_stopping: PositiveInt | None = None
    """Stop after this many consecutive evaluations without an improvement of `best_metric`."""
    early_stopping_threshold: Annotated[NonNegative, Needs(".early_stopping")] = 0.0
    """Minimum change of `best_metric` that counts as an improvement."""
    best_checkpoint: bool = False
    """Keep the checkpoint with the best `best_metric`, and save its adapter as the result."""
    best_metric: Annotated[str, Needs(".best_checkpoint .early_stopping")] = "loss"
    """Metric that best_checkpoint and early_stopping compare: the held-out loss (`loss`), one of `evaluation.metrics`,
    or TASK/METRIC from `evaluation.tasks`, such as gsm8k/exact_match/strict-match (with the filter, if it has one)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stop the run at a non-finite loss or gradient, or skip the step (at most 10 in a row)."""
    on_spike: Literal["warn", "ignore"] = "warn"
    """Warn about a loss far above those of the last 100 steps."""
    torch_compile: bool = False
    """Compile the model with torch.compile. This disables our fused operations (shared-input projections in one call,
    the adapter in one buffer, norms, SwiGLU, rotary embedding) and is slower than them: four layers of Llama-3.1-8B
    take 109 ms per step and 19.7 GiB with it, 89 ms and 7.8 GiB without (one H100, 4 x 2048 tokens)."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Capture the kernels of a micro-step in CUDA graphs and replay them, if the adapter is one buffer. `auto`: if the
    GPU waits for the host in the first steps (small batches of small models) and replay is faster."""
    cudnn_benchmark: bool = False
    """Benchmark cuDNN's kernels when training starts, and use the fastest."""
    deterministic: bool = False
    """Use only deterministic kernels."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Fraction of the GPU's memory that this run may use."""
    timeout_minutes: Positive = 30.0
    """Minutes that a collective waits for a rank before the run fails; raised to at least 3 x hang_timeout + 5."""
    hang_timeout: NonNegative = 10.0
    """Minutes without progress on a rank after which the run is stopped and the rank reported; 0 disables the
    watchdog."""
    max_restarts: Restarts | None = None
    """Maximum number of times that `zerolora train` restarts the ranks after failures, from the newest complete
    checkpoint, if the last attempt completed a step. Default: 3, but 0 if srun starts the ranks in a SLURM job that is
    requeued."""
    elastic: bool = False
    """Restart with the largest remaining number of ranks that divides the global batch if GPUs or hosts are lost or a
    rank repeatedly fails before its first step; more accumulation keeps the global batch the same."""
    launcher_timeout: NonNegative = 120.0
    """Seconds without a heartbeat of the `zerolora` process after which ranks on other hosts exit; 0: never."""

    @property
    def monitored_metric(self) -> str:
        """The metric by which evaluations are compared."""
        return self.best_metric if self.best_checkpoint or self.early_stopping else "loss"

    @model_validator(mode="before")
    @classmethod
    def _parse_fractions_of_run(cls, settings: Any) -> Any:
        """Convert `eval_steps` and `save_steps` from fractions of the run, as in transformers.

        With `max_steps`, a fraction such as 0.25 becomes a number of steps; otherwise it becomes `evals_per_epoch`
        or `saves_per_epoch`.
        """
        if not isinstance(settings, dict):
            return settings
        settings = dict(settings)
        epochs, steps = settings.get("epochs", 1), settings.get("max_steps")
        for name, other in FRACTION_SETTINGS.items():
            if isinstance(fraction := settings.get(name), float) and 0.0 < fraction < 1.0:
                if isinstance(steps, int):
                    settings[name] = math.ceil(fraction * steps)
                elif isinstance(epochs, (int, float)) and epochs > 0:
                    settings[other] = 1 / (settings.pop(name) * epochs)
        return settings


def compute_collective_timeout(training: TrainingSection) -> float:
    """Return torch's timeout for collectives in minutes, long enough for the watchdog to report the hung rank."""
    if not training.hang_timeout:
        return training.timeout_minutes
    return max(training.timeout_minutes, FIRST_STEP_FACTOR * training.hang_timeout + REPORT_MINUTES)


class ZeroSection(Section):
    """DeepSpeed's ZeRO: partitioning over the GPUs, and offload to host memory."""

    stage: Stage = 2
    """Partitioned state: 0 none, 1 optimizer state, 2 also gradients, 3 also parameters (including the base model).
    `auto`: the lowest that the memory estimate allows."""
    gather: Annotated[Literal["auto", "layer", "module"], _STAGE_3] = "auto"
    """How stage 3 gathers the base model. `layer`: one all-gather per decoder layer, one layer ahead, with the
    adapter replicated on every GPU (frozen bases only). `module`: DeepSpeed's gather, per parameter. `auto`: layer if
    possible."""
    shard_within: Annotated[
        Literal["auto", "host", "all"] | Annotated[int, Field(ge=2)],
        BeforeValidator(_check_shard_within),
        _STAGE_3,
        Needs(".gather", ("layer",)),
    ] = "auto"
    """Ranks that share one copy of the frozen base at stage 3: `all`, groups of this many ranks, or the ranks on a
    `host`, so that no weights cross the network in training. `auto`: host if the memory estimate allows it."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (stages 1 to 3)."""
    offload_parameters: bool = False
    """Keep partitioned parameters in host memory (stage 3)."""
    pin_memory: Annotated[bool, Needs(".offload_optimizer .offload_parameters")] = True
    """Use pinned host memory for offloading."""
    overlap_comm: Annotated[bool, _PARTITIONED] = True
    """Reduce gradients during the backward pass (GPU only)."""
    reduce_bucket_size: Annotated[int, Field(ge=1, le=10**11), _PARTITIONED] = 200_000_000
    """Elements per gradient reduction."""
    allgather_bucket_size: Annotated[int, Field(ge=1, le=10**11), _PARTITIONED] = 200_000_000
    """Elements per parameter gather (stages 1 and 2)."""
    prefetch_bucket_size: Annotated[Elements, _STAGE_3, _BY_MODULE] = 50_000_000
    """Number of elements that stage 3 prefetches."""
    persistence_threshold: Annotated[Elements, _STAGE_3, _BY_MODULE] = 100_000
    """Stage 3 does not partition parameters with fewer elements than this."""
    max_live_parameters: Annotated[int, Field(ge=1, le=10**13), _STAGE_3, _BY_MODULE] = 1_000_000_000
    """Maximum number of elements that stage 3 keeps gathered."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Keys of DeepSpeed's configuration that have no setting here, merged in last."""


class OpsSection(Section):
    """Operators for the adapters and the model."""

    backend: Annotated[Literal["auto", "cuda", "reference", "peft"], _ADAPTER] = "auto"
    """`cuda`: fused operators; `reference`: the same in plain torch; `peft`: PEFT's layers. `auto` reports its
    choice."""
    flat: Annotated[bool, _ADAPTER] = True
    """Keep all adapter parameters with the same learning rate in one buffer, which DeepSpeed treats as one tensor."""
    recompute: Annotated[Literal["activations", "norms", "none"], _ADAPTER] = "activations"
    """Cheap results to recompute in the backward pass instead of keeping them, in layers without gradient
    checkpointing: `activations` of SwiGLU (saves 7 of 50 GiB for 1 % more time at 8B and 8,192 tokens), or `norms`, to
    also recompute the outputs of norms."""
    elementwise: Literal["auto", "off"] = "auto"
    """Kernels of norms, SwiGLU and rotary embedding on a GPU. `auto`: ours if their results match the model's
    code. `off`: the model's code."""
