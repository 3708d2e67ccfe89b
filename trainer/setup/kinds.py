"""Functions that differ between language and image models and are needed before a task exists."""

from typing import Any

from trainer.checkpoint.finished_run import FinishedRun
from trainer.config import RunConfig, UserError
from trainer.data.prepared import PreparedRun
from trainer.memory.decisions import Machine
from trainer.memory.image_models import ImagePlanner
from trainer.memory.planner import Planner
from trainer.model.base import build_empty_model
from trainer.model.published_shapes import is_random
from trainer.model.tensor_files import has_local_weights
from trainer.setup.shown_data import show_images, show_text
from trainer.setup.text_run import build_unprepared_planner, find_task, prepare_text_run, read_model_files
from trainer.tasks.images.files import DIFFUSERS_FILE
from trainer.tasks.images.model import ImageModel
from trainer.tasks.images.pipeline import is_pipeline, read_pipeline
from trainer.tasks.images.prepare import prepare_image_run
from trainer.tasks.images.task import ImageTask
from trainer.tasks.task import Task


class LanguageKind:
    planner = Planner
    prepare = staticmethod(prepare_text_run)
    read_files = staticmethod(read_model_files)
    build_unprepared_planner = staticmethod(build_unprepared_planner)
    show_data = staticmethod(show_text)

    find_task_class = staticmethod(find_task)

    @staticmethod
    def has_weights(config: RunConfig) -> bool:
        return is_random(config.base_model) or has_local_weights(config.base_model, config.model)

    @staticmethod
    def describe(config: RunConfig, prepared: PreparedRun) -> tuple[Any, list[str]]:
        """Return the model without weights, and the lines that `zerolora validate` prints about it."""
        model = build_empty_model(prepared.model_config, config.model)
        layers = prepared.model_config.get_text_config().num_hidden_layers
        context = f", context {prepared.context_length:,}" if prepared.context_length else ""
        tokenizer = prepared.tokenizer
        return model, [
            f"model: {config.base_model}: {type(model).__name__}, {model.num_parameters():,} parameters, "
            f"{layers} layers{context}",
            f"tokenizer: {type(tokenizer).__name__}, {len(tokenizer):,} tokens, pads with {tokenizer.pad_token!r}",
        ]


class ImageKind:
    planner = ImagePlanner
    prepare = staticmethod(prepare_image_run)
    show_data = staticmethod(show_images)

    @staticmethod
    def find_task_class(config: RunConfig) -> type[ImageTask]:
        return ImageTask

    @staticmethod
    def read_files(config: RunConfig) -> None:
        """Do nothing, because the pipeline is read with the data."""

    @staticmethod
    def has_weights(config: RunConfig) -> bool:
        return True

    @staticmethod
    def build_unprepared_planner(config: RunConfig, machine: Machine) -> tuple[Planner, list[str]]:
        pipeline, side = read_pipeline(config.base_model, config.model), config.image.resolution
        planner = ImagePlanner.from_run(machine, config, PreparedRun(None, pipeline, None))
        return planner, [f"every image counts as {side} x {side}"]

    @staticmethod
    def describe(config: RunConfig, prepared: PreparedRun) -> tuple[Any, list[str]]:
        model = ImageModel(prepared.model_config)
        name = f"{type(model.denoiser).__name__} of {model.family.pipeline}"
        return model, [f"model: {config.base_model}: {name}, {model.denoiser.num_parameters():,} parameters"]


def find_model_kind(config: RunConfig) -> type[LanguageKind] | type[ImageKind]:
    if config.task == "auto":
        return ImageKind if is_pipeline(config.base_model, config.model) else LanguageKind
    return ImageKind if config.task == "image" else LanguageKind


def find_adapter_kind(run: FinishedRun) -> type[LanguageKind] | type[ImageKind]:
    """Return a finished run's model kind, based on its adapter's files, because the base model may be missing."""
    return ImageKind if (run.folder / DIFFUSERS_FILE).is_file() else LanguageKind


def find_task_class(run: FinishedRun) -> type[Task]:
    return find_adapter_kind(run).find_task_class(run.config)


def check_task_supports(run: FinishedRun, feature: str) -> None:
    """Raise UserError if the run's task does not support `feature`, a command or one of its options."""
    task = find_task_class(run)
    if reason := task.unsupported.get(feature):
        raise UserError(f"{run.folder}: is an adapter of {task.title}; {reason}")
