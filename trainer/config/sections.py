"""Every setting of a run, section by section; the text under a field is its documentation and its only default."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.data_sections import DatasetSection
from trainer.config.model_sections import LoraSection, ModelSection, QuantizationSection
from trainer.config.paths import PathText
from trainer.config.training_sections import OpsSection, TrainingSection, ZeroSection
from trainer.config.types import Count, NonNegative, Positive, PositiveInt, Section, Texts, Words


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
    tokens: Annotated[int, Field(ge=1, le=10**16)] | None = None
    """Target tokens N the information is spread over; counted from the data set unless it streams."""
    check_every: PositiveInt = 50
    """Steps between checks that lambda is the same to the bit on all ranks."""


class LoggingSection(Section):
    """What is shown and recorded."""

    report_to: Words = ("tensorboard",)
    """tensorboard, wandb, or none. metrics.jsonl is always written."""
    run_name: Annotated[str, Field(max_length=255)] | None = None
    """Name of the run in TensorBoard and wandb; the output folder's name if not given."""
    project: str = "zerolora"
    """Project in wandb."""
    sample_prompts: Texts = ()
    """User messages that the model answers before and after training."""
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


class RunConfig(Section):
    """A whole run."""

    base_model: PathText
    """Folder or hub name of a Hugging Face causal language model."""
    adapter: Literal["lora", "qlora", "none"] = "lora"
    """lora: adapter on the model as it is. qlora: adapter on a 4-bit base. none: train all weights."""
    output_dir: PathText
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
