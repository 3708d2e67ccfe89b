"""Define all settings of a run, by section. A field's docstring is its user documentation."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.data_sections import DatasetSection
from trainer.config.evaluation_section import EvaluationSection
from trainer.config.model_sections import LoraSection, ModelSection, QuantizationSection, VisionSection
from trainer.config.needs import LANGUAGE, Needs
from trainer.config.paths import OutputText, PathText
from trainer.config.task_sections import ImageSection, PreferenceSection, RewardSection
from trainer.config.training_sections import OpsSection, TrainingSection, ZeroSection
from trainer.config.types import Count, Fraction, NonNegative, Positive, PositiveInt, Section, StringList, Texts

PUBLISHED_LAW = {"kp": 0.8, "ki": 0.15, "deadband": 0.002, "lambda_start": 1.0}
LOGIT_LAW = {"kp": 0.5, "ki": 0.025, "deadband": 0.05, "lambda_start": 0.1}
KL_LAW = {"kp": 0.5, "ki": 0.1, "deadband": 0.05, "lambda_start": 0.1}
AUTO_TARGET = 0.02
"""Close to the final S with the best fixed lambda: 1.5 and 4.9 % with scu.sigma=0.03 (docs/lab/scu.md)."""
START_TARGET_PRODUCT = 0.12
"""Initial lambda times the target. With a strong penalty, lambda * S converged to 0.140 and 0.194 on the two texts in
docs/lab/scu.md; with a slightly smaller initial lambda, S reaches the target."""
MAX_AUTO_CACHE_BYTES = 2**30
_ADAPTER = Needs("adapter", ("lora", "qlora"))
_PI, _PUBLISHED = Needs(".controller", ("pi",)), Needs(".law", ("published",))
_KL, _INFORMATION = Needs(".measure", ("kl",)), Needs(".measure", ("delta", "factors"))


class ScuSection(Section):
    """The Shannon Control Unit: a PI controller that keeps the change made by the adapter at a target."""

    enabled: bool = False
    """Enable the controller."""
    measure: Literal["delta", "factors", "kl"] = "delta"
    """The controlled quantity: S, the fraction of information in the effective update s B A (`delta`) or in the factors
    A and B (`factors`); or K, the KL divergence between the adapted and the base model on reference text, in bits per
    token (`kl`)."""
    controller: Literal["pi", "fixed", "linear", "cosine", "none"] = "pi"
    """How lambda is set. `none` only measures."""
    law: Annotated[Literal["logit", "published"], _PI] = "logit"
    """Error signal of the PI controller. `logit`: the error in logit S, once S has reached the target.
    `published`: the error in S, as in the published scripts. `kl` always uses the error in ln K."""
    target: Annotated[float, Field(gt=0.0, le=1000.0)] | Literal["auto"] = "auto"
    """Target of S = ParamBPT / (DataBPT + ParamBPT), or of K in bits per token. `auto`: 0.02 for `delta`, the published
    value for the model's size for `factors`, 0.05 bits for `kl`."""
    kp: Annotated[NonNegative | Literal["auto"], _PI] = "auto"
    """Proportional gain; eight times as large for `kl` if K is below the target. `auto`: 0.5; 0.8 with the published
    law."""
    ki: Annotated[NonNegative | Literal["auto"], _PI] = "auto"
    """Integral gain; four times as large for `kl` if K is below the target. `auto`: 0.025; 0.1 for `kl`; 0.15 with
    the published law."""
    deadband: Annotated[NonNegative | Literal["auto"], _PI] = "auto"
    """Largest error that leaves lambda unchanged. `auto`: 0.05, about 5 % of the target; 0.002 in S with the
    published law."""
    ema: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Weight of the newest measurement in the moving average."""
    leak: Annotated[float, Field(ge=0.0, le=1.0), _PI, _PUBLISHED] = 0.995
    """Factor that multiplies the published law's integral at every update."""
    integral_bound: Annotated[Positive, _PI, _PUBLISHED] = 0.2
    """Largest absolute value of the published law's integral."""
    lambda_start: Annotated[Positive | Literal["auto"], Needs(".controller", ("pi", "fixed", "linear", "cosine"))] = (
        "auto"
    )
    """Initial lambda, and the constant for `fixed`. `kl`: lambda is 0 until K first exceeds the target, then this.
    `auto`: 0.12 divided by the target, near the final lambda; 0.1 for `kl`, `factors`, `linear` and `cosine`; 1 with
    the published law."""
    lambda_min: Positive = 1e-4
    """Minimum lambda."""
    lambda_max: Positive = 1e4
    """Maximum lambda, at which linear and cosine end."""
    sigma: Annotated[Positive | Literal["auto"], _INFORMATION] = "auto"
    """Standard deviation of the Gaussian prior on the weights. `auto`: 0.03; 0.01 for `factors`, as published."""
    reference: Annotated[PathText | None, _KL] = None
    """`kl`: text on which the outputs should stay close to the base model's: a file, folder or Hub ID, read like
    `dataset.path`; K is measured on all its tokens."""
    reference_share: Annotated[float, Field(gt=0.0, le=1.0), _KL] = 0.125
    """`kl`: tokens of reference text per step, as a fraction of the training tokens."""
    reference_cache: Annotated[Literal["auto"] | bool, _KL] = "auto"
    """`kl`: keep the base model's last hidden states for the reference text in host memory, which avoids a forward
    pass in each step. `auto`: if they take at most 1 GiB per rank and each text is used at least twice."""
    scale_to_target: Annotated[bool, _KL, _PI] = True
    """`kl` with `pi` and 64 or more reference texts: hold out an eighth of them, at most 64. If K on these exceeds the
    target at the end of training, scale the saved update down to the target."""
    every: PositiveInt = 1
    """Optimizer steps between updates of lambda."""
    tokens: Annotated[Annotated[int, Field(ge=1, le=10**16)] | None, _INFORMATION] = None
    """Number N of target tokens by which information is divided; default: counted in the dataset, unless it streams."""
    check_every: PositiveInt = 50
    """Steps between checks that lambda is bitwise equal on all ranks."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, settings: Any) -> Any:
        """Replace `auto` with numbers, except for the target, which may depend on the model."""
        if not isinstance(settings, dict):
            return settings
        defaults = PUBLISHED_LAW if settings.get("law") == "published" else LOGIT_LAW
        defaults = KL_LAW if settings.get("measure") == "kl" else defaults
        defaults = defaults | {"sigma": 0.01 if settings.get("measure") == "factors" else 0.03}
        start = _choose_start(settings) if settings.get("law") != "published" else None
        defaults["lambda_start"] = _clamp_start(settings, defaults["lambda_start"] if start is None else start)
        return settings | {name: value for name, value in defaults.items() if settings.get(name, "auto") == "auto"}


def _choose_start(settings: dict[str, Any]) -> float | None:
    """Return an initial lambda close to the final one, which limits the overshoot of S.

    Returns None unless the measure is `delta`, the controller is `pi` or `fixed`, and the target is valid.
    """
    if settings.get("measure", "delta") != "delta" or settings.get("controller", "pi") not in ("pi", "fixed"):
        return None
    target = settings.get("target", "auto")
    target = AUTO_TARGET if target == "auto" else target
    if not isinstance(target, int | float) or not 0.0 < target < 1.0:
        return None
    return START_TARGET_PRODUCT / target


def _clamp_start(settings: dict[str, Any], start: float) -> float:
    low, high = (settings.get(f"lambda_{bound}", default) for bound, default in (("min", 1e-4), ("max", 1e4)))
    has_bounds = isinstance(low, int | float) and isinstance(high, int | float) and low < high
    return min(max(start, low), high) if has_bounds else start


class ParallelSection(Section):
    """Sequence parallelism, in addition to ZeRO."""

    sequence: Annotated[Count, LANGUAGE] = 1
    """Number of ranks that share each sequence, for sequences too long for one GPU: each computes an equal part of the
    tokens and attention heads. Must divide the numbers of ranks and attention heads. These ranks count as one in the
    global batch size."""


TRACKERS = ("wandb", "mlflow", "trackio", "swanlab", "comet_ml")
"""Experiment trackers, named by their packages as in transformers."""


class LoggingSection(Section):
    """Console output and metrics."""

    report_to: StringList = ("tensorboard",)
    """tensorboard, wandb, mlflow, trackio, swanlab, comet_ml, or none. metrics.jsonl is always written."""
    run_name: Annotated[str, Field(max_length=255)] | None = None
    """Name of the run in TensorBoard and trackers; default: the name of the output folder."""
    project: Annotated[str, Needs(".report_to", TRACKERS)] = "zerolora"
    """Project name in a tracker (the experiment in mlflow)."""
    sample_prompts: Texts = ()
    """User messages that the model answers before and after training; for an image model, captions of sample images."""
    sample_tokens: Annotated[Count, LANGUAGE, Needs(".sample_prompts")] = 64
    """Maximum length of an answer to a sample prompt in tokens."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """`auto`: a progress bar on a terminal, else a line every `logging_steps`."""
    profile_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of final steps to record with torch.profiler; writes one trace per rank in profile/, for Perfetto."""


class OutputSection(Section):
    """The output folder of the run."""

    overwrite: bool | Literal["delete"] = False
    """How to handle an earlier run in output_dir. true: move it to OUTPUT_DIR.1, .2 and so on; `delete`: delete its
    files and checkpoints, but no other files; false: stop with an error."""


class ExportSection(Section):
    """The server that will use the adapter."""

    target: Annotated[Literal["vllm", "sglang", "llama.cpp", "ollama"] | None, LANGUAGE] = None
    """Server that will load the adapter: `validate` and training warn about adapted layers that it does not support."""


class TierSection(Section):
    """Limits that `zerolora tier` checks; not used in training."""

    seconds: Positive | None = None
    """Maximum time of the whole command."""
    peak_memory_gib: Positive | None = None
    """Maximum memory allocated by torch on a GPU."""
    loss_fall: Fraction | None = None
    """Minimum decrease from the mean of the first 10 training losses to that of the last 10, as a fraction."""
    memory_growth: Fraction = 0.01
    """Maximum growth of peak memory after warm-up, as a fraction."""
    throughput_change: Fraction = 0.05
    """Maximum difference in tokens per second between the first 100 steps after warm-up and the last 100, as a
    fraction."""
    baseline_loss: Fraction = 0.1
    """Maximum decrease in tokens per second from the first run on this type of GPU, as a fraction."""


class RunConfig(Section):
    """The settings of a run."""

    base_model: PathText
    """Folder or Hub ID of a causal language model (transformers) or of a diffusers pipeline."""
    task: Literal["auto", "language", "preference", "reward", "image"] = "auto"
    """Kind of training: a language model on texts or conversations (`language`) or on pairs of a better and a worse
    answer (`preference`), a reward model on such pairs (`reward`), or an image model. `auto`: image if the model has a
    model_index.json, else language."""
    adapter: Literal["lora", "qlora", "none"] = "lora"
    """lora: adapter on the unquantized model. qlora: adapter on a model quantized to 4 or 8 bits
    (`quantization.quant_type`). none: train all weights."""
    output_dir: OutputText
    """Folder or object-store URL, such as s3://bucket/run, for the adapter, checkpoints, logs, metrics and report;
    default: runs/NAME for NAME.yaml."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed for all random numbers."""
    model: ModelSection = ModelSection()
    lora: Annotated[LoraSection, Needs("adapter", ("lora", "qlora"))] = LoraSection()
    quantization: Annotated[QuantizationSection, Needs("adapter", ("qlora",))] = QuantizationSection()
    vision: Annotated[VisionSection, LANGUAGE] = VisionSection()
    adapters: Annotated[tuple[dict[str, Any], ...], Field(max_length=256), _ADAPTER] = ()
    """Adapters to train together on one base model: a list with each adapter's `name` (its folder below output_dir) and
    the settings that differ, such as [{name: low, training.learning_rate: 1e-4}, {name: high, training.learning_rate:
    1e-3}]."""
    dataset: DatasetSection
    preference: Annotated[PreferenceSection, Needs("task", ("preference",))] = PreferenceSection()
    reward: Annotated[RewardSection, Needs("task", ("reward",))] = RewardSection()
    image: Annotated[ImageSection, Needs("task", ("image",))] = ImageSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    zero: ZeroSection = ZeroSection()
    parallel: ParallelSection = ParallelSection()
    scu: Annotated[ScuSection, Needs("scu.enabled", (True,))] = ScuSection()
    ops: OpsSection = OpsSection()
    logging: LoggingSection = LoggingSection()
    output: OutputSection = OutputSection()
    export: ExportSection = ExportSection()
    tier: TierSection = TierSection()

    _runs: "tuple[RunConfig, ...]" = ()

    @property
    def runs(self) -> "tuple[RunConfig, ...]":
        """One configuration per entry of `adapters`, as for separate runs (trainer/config/adapter_entries.py)."""
        return self._runs

    def count_data_ranks(self, ranks: int) -> int:
        """Return the number of ranks that train on different samples; ranks that share a sequence count as one."""
        return max(1, ranks // self.parallel.sequence)

    def fit_max_length(self, limit: int | None) -> "RunConfig":
        """Return the configuration with `max_length` limited to `limit` tokens, unless `max_length` was set."""
        data = self.dataset
        if limit is None or data.max_length <= limit or "max_length" in data.model_fields_set:
            return self
        return self.model_copy(update={"dataset": data.model_copy(update={"max_length": limit})})

    @model_validator(mode="after")
    def _set_derived_attributes(self) -> "RunConfig":
        if self.task == "reward":  # in a copy, because configurations share the default section
            self.__dict__["model"] = self.model.model_copy()
            self.model._has_score = True
        if self.vision.train != "none":
            self.__dict__["lora"] = self.lora.model_copy()
            self.lora._image_parts = self.vision.train
        return self
