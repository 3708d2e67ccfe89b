"""The configuration of a run: one YAML file, frozen pydantic models, one error message per mistake."""

from trainer.config.adapter_settings import trained_in_full
from trainer.config.checks import TILES_NO_GRAPHS, find_graph_obstacle, find_tile_obstacle
from trainer.config.command_line import CommandParser
from trainer.config.data_sections import DatasetSection, SourceSection
from trainer.config.errors import UserError
from trainer.config.image_section import ImageSection
from trainer.config.load import LoadedConfig, dump_yaml, load_config
from trainer.config.model_sections import LoraSection, ModelSection, QuantizationSection
from trainer.config.sections import LoggingSection, OutputSection, RunConfig, ScuSection, TierSection
from trainer.config.training_sections import (
    FIRST_STEP_FACTOR,
    OpsSection,
    TrainingSection,
    ZeroSection,
    collective_timeout,
)
from trainer.config.types import AUTO
from trainer.config.zero import engine_stage, engine_zero, gathers_by_layer, why_not_by_layer

__all__ = [
    "AUTO",
    "FIRST_STEP_FACTOR",
    "TILES_NO_GRAPHS",
    "CommandParser",
    "DatasetSection",
    "ImageSection",
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
    "TierSection",
    "TrainingSection",
    "UserError",
    "ZeroSection",
    "collective_timeout",
    "dump_yaml",
    "engine_stage",
    "engine_zero",
    "find_graph_obstacle",
    "find_tile_obstacle",
    "gathers_by_layer",
    "load_config",
    "trained_in_full",
    "why_not_by_layer",
]
