"""The configuration of a run: one YAML file, frozen pydantic models, one error message per mistake."""

from trainer.config.command_line import CommandParser, reports_errors
from trainer.config.data_sections import DatasetSection, SourceSection
from trainer.config.errors import UserError
from trainer.config.load import LoadedConfig, dump_yaml, load_config
from trainer.config.model_sections import LoraSection, ModelSection, QuantizationSection
from trainer.config.sections import LoggingSection, RunConfig, ScuSection
from trainer.config.task_sections import ImageSection
from trainer.config.training_sections import OPTIMIZERS, TrainingSection, ZeroSection, compute_collective_timeout
from trainer.config.types import AUTO
from trainer.config.zero import resolve_engine_zero

__all__ = [
    "AUTO",
    "OPTIMIZERS",
    "CommandParser",
    "DatasetSection",
    "ImageSection",
    "LoadedConfig",
    "LoggingSection",
    "LoraSection",
    "ModelSection",
    "QuantizationSection",
    "RunConfig",
    "ScuSection",
    "SourceSection",
    "TrainingSection",
    "UserError",
    "ZeroSection",
    "compute_collective_timeout",
    "dump_yaml",
    "load_config",
    "reports_errors",
    "resolve_engine_zero",
]
