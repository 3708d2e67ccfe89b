"""The configuration of a run: one YAML file, frozen pydantic models, one clear line per mistake."""

from trainer.config.errors import UserError
from trainer.config.load import LoadedConfig, dump_yaml, load_config
from trainer.config.sections import (
    DatasetSection,
    LoggingSection,
    LoraSection,
    ModelSection,
    OpsSection,
    OutputSection,
    QuantizationSection,
    RunConfig,
    ScuSection,
    SourceSection,
    TrainingSection,
    ZeroSection,
)

__all__ = [
    "DatasetSection",
    "LoadedConfig",
    "LoggingSection",
    "LoraSection",
    "ModelSection",
    "OpsSection",
    "OutputSection",
    "QuantizationSection",
    "RunConfig",
    "ScuSection",
    "SourceSection",
    "TrainingSection",
    "UserError",
    "ZeroSection",
    "dump_yaml",
    "load_config",
]
