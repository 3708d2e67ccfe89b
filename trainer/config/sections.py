"""Every setting of a run, section by section; the text under a field is its documentation and its only default."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.data_sections import DatasetSection
from trainer.config.image_section import ImageSection
from trainer.config.model_sections import LoraSection, ModelSection, QuantizationSection
from trainer.config.paths import PathText
from trainer.config.training_sections import OpsSection, TrainingSection, ZeroSection
from trainer.config.types import Count, Fraction, NonNegative, Positive, PositiveInt, Section, Texts, Words

PUBLISHED_LAW = {"kp": 0.8, "ki": 0.15, "deadband": 0.002, "lambda_start": 1.0}
LOGIT_LAW = {"kp": 0.5, "ki": 0.025, "deadband": 0.05, "lambda_start": 0.1}
KL_LAW = {"kp": 0.5, "ki": 0.1, "deadband": 0.05, "lambda_start": 0.1}
AUTO_TARGET = 0.02
"""S of the update under the fixed lambda that ends best is 1.5 and 4.9 % with scu.sigma=0.03 (docs/lab/scu.md)."""
START_TIMES_TARGET = 0.12
"""lambda S of a run whose term is strong and has come to rest was 0.140 to 0.194 on the two texts of docs/lab/scu.md; a
little less lets S reach the target."""
_IN_EVERY_RECORD = {"measure", "kp", "ki", "ema", "leak", "every", "tokens", "check_every"}


class ScuSection(Section):
    """The Shannon Control Unit: a PI controller that holds what the adapter changes at a target."""

    enabled: bool = False
    """Switch the controller on."""
    measure: Literal["delta", "factors", "kl"] = "delta"
    """What is held. The fraction S of information in the effective update s B A (`delta`), or in the factors A and B
    themselves (`factors`); or K, bits a token between the outputs of adapter and base on reference text (`kl`)."""
    controller: Literal["pi", "fixed", "linear", "cosine", "none"] = "pi"
    """What moves lambda. `none` measures only."""
    law: Literal["logit", "published"] = "logit"
    """How PI moves it. `logit`: by the error in logit S, from when S first reaches the target. `published`: by the
    error in S, as the published scripts do. `kl` has a law of its own, by the error in ln K."""
    target: Annotated[float, Field(gt=0.0, le=1000.0)] | Literal["auto"] = "auto"
    """S = ParamBPT / (DataBPT + ParamBPT) to hold, or K in bits a token. `auto`: 0.02 for `delta`, the published value
    by size for `factors`, 0.05 bits for `kl`."""
    kp: NonNegative | Literal["auto"] = "auto"
    """Proportional gain; `kl`: eight times that below the target. `auto`: 0.5; 0.8 by the published law."""
    ki: NonNegative | Literal["auto"] = "auto"
    """Integral gain; `kl`: four times that below the target. `auto`: 0.025, 0.1 for `kl`; 0.15 by the published law."""
    deadband: NonNegative | Literal["auto"] = "auto"
    """Error within which lambda stays. `auto`: 0.05, a twentieth of the target; 0.002 of S by the published law."""
    ema: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Weight of the newest measurement in the smoothed one."""
    leak: Annotated[float, Field(ge=0.0, le=1.0)] = 0.995
    """Factor on the integral at every update of the published law."""
    integral_bound: Positive = 0.2
    """Largest absolute value of the published law's integral."""
    lambda_start: Positive | Literal["auto"] = "auto"
    """First lambda, and the value of `fixed`. `kl`: lambda is 0 until K first passes the target, then this. `auto`:
    0.12 over the target, near which lambda comes to rest; 0.1 for `kl`, `factors`, `linear` and `cosine`; 1 by the
    published law."""
    lambda_min: Positive = 1e-4
    """Smallest lambda."""
    lambda_max: Positive = 1e4
    """Largest lambda; linear and cosine end here."""
    rate_floor: Fraction = 0.0
    """Fraction of the peak below which PI lets the learning rate not fall after warm-up: what acts on the gradient
    loses its hold as the rate goes to 0."""
    sigma: Positive | Literal["auto"] = "auto"
    """Standard deviation of the Gaussian prior on the weights. `auto`: 0.03; 0.01 for `factors`, as published."""
    reference: PathText | None = None
    """`kl`: text whose answers should stay the base's: a file, folder or hub name, read as `dataset.path` is, all of it
    without labels. None: the base's own samples, drawn before training, which keep less of other texts."""
    reference_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.125
    """`kl`: tokens of reference text a step, over the tokens trained on."""
    reference_cache: Literal["auto"] | bool = "auto"
    """`kl`: keep the base's last hidden states of the reference text on the host, so that no step makes a forward pass
    of the base. `auto`: where they take at most 1 GiB a rank and the run comes to each text twice or more."""
    scale_to_target: bool = True
    """`kl` with `pi`: keep an eighth of the reference texts apart, 64 at most, and where K is over the target on them
    when training ends, save only as large a part of the adapter's update as is within it. Of 64 texts and more."""
    every: PositiveInt = 1
    """Optimizer steps between updates of lambda."""
    tokens: Annotated[int, Field(ge=1, le=10**16)] | None = None
    """Target tokens N the information is spread over; counted from the data set unless it streams."""
    check_every: PositiveInt = 50
    """Steps between checks that lambda is the same to the bit on all ranks."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, settings: Any) -> Any:
        """Put numbers in place of `auto`, but for the target, which may look at the model."""
        if not isinstance(settings, dict):
            return settings
        if "law" not in settings and settings.keys() >= _IN_EVERY_RECORD:
            settings = settings | {"law": "published"}  # the record of a run from before there was another law
        known = PUBLISHED_LAW if settings.get("law") == "published" else LOGIT_LAW
        known = KL_LAW if settings.get("measure") == "kl" else known
        known = known | {"sigma": 0.01 if settings.get("measure") == "factors" else 0.03}
        start = _start_of(settings) if settings.get("law") != "published" else None
        known = known | {"lambda_start": _between_bounds(settings, known["lambda_start"] if start is None else start)}
        return settings | {name: value for name, value in known.items() if settings.get(name, "auto") == "auto"}


def _start_of(settings: dict[str, Any]) -> float | None:
    """The first lambda of the law in the logit, of `delta`: near its last, so that S never runs far past the target."""
    if settings.get("measure", "delta") != "delta" or settings.get("controller", "pi") not in ("pi", "fixed"):
        return None
    target = settings.get("target", "auto")
    target = AUTO_TARGET if target == "auto" else target
    if not isinstance(target, int | float) or not 0.0 < target < 1.0:
        return None
    return START_TIMES_TARGET / target


def _between_bounds(settings: dict[str, Any], start: float) -> float:
    """What nobody has given is not to be outside of bounds that somebody has."""
    low, high = (settings.get(f"lambda_{side}", default) for side, default in (("min", 1e-4), ("max", 1e4)))
    bounded = isinstance(low, int | float) and isinstance(high, int | float) and low < high
    return min(max(start, low), high) if bounded else start


class LoggingSection(Section):
    """What is shown and recorded."""

    report_to: Words = ("tensorboard",)
    """tensorboard, wandb, or none. metrics.jsonl is always written."""
    run_name: Annotated[str, Field(max_length=255)] | None = None
    """Name of the run in TensorBoard and wandb; the output folder's name if not given."""
    project: str = "zerolora"
    """Project in wandb."""
    sample_prompts: Texts = ()
    """User messages that the model answers before and after training; of an image model, what it draws."""
    sample_tokens: Count = 64
    """Longest answer to a sample prompt."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """A live bar on a terminal, a line every `logging_steps` elsewhere."""
    profile_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """Record the last so many steps with torch.profiler: a trace of each rank in profile/, for Perfetto."""


class OutputSection(Section):
    """The folder of the run."""

    overwrite: bool | Literal["delete"] = False
    """What becomes of an earlier run in output_dir. true: it is moved aside, to OUTPUT_DIR.1, .2 and so on; `delete`:
    the files that its record lists are deleted, yours stay; false: nothing, and the new run is refused."""


class ExportSection(Section):
    """Where the adapter will be served."""

    target: Literal["vllm", "sglang", "llama.cpp", "ollama"] | None = None
    """The server that the adapter is for: `validate` and the start of training warn of what it would not apply."""


class TierSection(Section):
    """Limits that `zerolora tier` asserts of a run; training itself does not look at them."""

    seconds: Positive | None = None
    """The whole command takes less."""
    peak_memory_gib: Positive | None = None
    """torch's largest allocation on the card."""
    loss_fall: Fraction | None = None
    """Fraction by which the mean of the last 10 training losses lies below that of the first 10."""
    memory_growth: Fraction = 0.01
    """Fraction by which the peak may grow after the warm-up."""
    throughput_change: Fraction = 0.05
    """Fraction by which the last 100 steps may differ in tokens a second from the first 100 after the warm-up."""
    baseline_loss: Fraction = 0.1
    """Fraction of the tokens a second of this card's first run that a later one may lack."""


class RunConfig(Section):
    """A whole run."""

    base_model: PathText
    """Folder or hub name of a Hugging Face causal language model, or of a pipeline of diffusers."""
    task: Literal["auto", "language", "image"] = "auto"
    """What kind of model it is; `auto`: a pipeline of images where there is a model_index.json."""
    adapter: Literal["lora", "qlora", "none"] = "lora"
    """lora: adapter on the model as it is. qlora: adapter on a base in 4 or 8 bits
    (`quantization.quant_type`). none: train all weights."""
    output_dir: PathText
    """Folder for the adapter, checkpoints, logs, metrics and plots; runs/NAME for NAME.yaml where nothing is given."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of everything random."""
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    quantization: QuantizationSection = QuantizationSection()
    dataset: DatasetSection
    image: ImageSection = ImageSection()
    training: TrainingSection = TrainingSection()
    zero: ZeroSection = ZeroSection()
    scu: ScuSection = ScuSection()
    ops: OpsSection = OpsSection()
    logging: LoggingSection = LoggingSection()
    output: OutputSection = OutputSection()
    export: ExportSection = ExportSection()
    tier: TierSection = TierSection()
