"""A run's diffusers pipeline: its folder, its family, and the settings of its denoiser and scheduler."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field

from trainer.config import ImageSection, ModelSection, UserError
from trainer.config.files import UnreadableFileError, read_json, read_safetensors_header
from trainer.config.yaml_core import read_yaml
from trainer.data.built_folder import load_or_build
from trainer.data.sources import disable_retries_without_network
from trainer.model.model_source import build_load_error, check_source, find_cached_file
from trainer.model.published_shapes import is_random, parse_name
from trainer.tasks.images.families import FAMILIES, Family, find_family

INDEX = "model_index.json"
VAE = "vae"
SAMPLED_BYTES = 1 << 20
MAX_REASON_LENGTH = 300
Finite = Annotated[float, Field(allow_inf_nan=False)]
SHAPES_FILE = Path(__file__).with_name("published_shapes.yaml")


@dataclass(frozen=True)
class PublishedShape:
    """An entry in published_shapes.yaml: settings of a denoiser and its scheduler, and the shapes of their inputs."""

    family: str
    settings: dict[str, Any]
    scheduler: dict[str, Any]
    channels: int
    """Number of latent channels."""
    text: dict[str, Sequence[int]]
    """Shapes of a caption's conditioning tensors, by name."""


@cache
def load_shapes() -> dict[str, PublishedShape]:
    return {name: PublishedShape(**shape) for name, shape in read_yaml(SHAPES_FILE).tree.items()}


def find_published_shape(base_model: str) -> tuple[PublishedShape, dict[str, Any]] | None:
    """Return the published shape in a name `random:SHAPE,key=value,...`, and its settings with these changes."""
    if not is_random(base_model):
        return None
    name, changes = parse_name(base_model)
    shape = load_shapes().get(name)
    return None if shape is None else (shape, shape.settings | changes)


def is_pipeline(name: str, section: ModelSection) -> bool:
    """Return whether a model is an image pipeline, judging by local files only."""
    if find_published_shape(name) is not None or (Path(name) / INDEX).is_file() or _is_single_file(Path(name)):
        return True
    return not Path(name).exists() and find_cached_file(name, INDEX, section.revision) is not None


@dataclass(frozen=True)
class VaeSettings:
    block_out_channels: list[int]
    latent_channels: int = 4
    scaling_factor: Finite | None = None
    shift_factor: Finite | None = None


@dataclass(frozen=True)
class Pipeline:
    """A pipeline before its weights are read. `folder` is None for random weights."""

    base_model: str
    family: Family
    settings: dict[str, Any]
    """Settings of the denoiser."""
    scheduler_settings: dict[str, Any]
    folder: Path | None
    channels: int
    """Number of latent channels."""
    downsampling: int
    """Pixels per latent, in each direction."""
    caption_shapes: dict[str, Sequence[int]]
    """Shapes of a caption's conditioning tensors, by name; used by pipelines with random weights."""

    @property
    def denoiser_folder(self) -> str:
        """Folder of the denoiser's weights and settings; empty for a random pipeline."""
        return "" if self.folder is None else str(self.folder / self.family.denoiser)

    def build_empty_denoiser(self) -> Any:
        import diffusers
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return getattr(diffusers, self.family.model).from_config(self.settings)

    def build_training_scheduler(self, image: ImageSection) -> Any:
        import diffusers

        changes: dict[str, Any] = {}
        kind = getattr(diffusers, self.family.scheduler)
        if self.family.is_flow_matching and image.time_shift != "auto":
            changes = {"shift": image.time_shift, "use_dynamic_shifting": False}
        if not self.family.is_flow_matching and image.prediction != "auto":
            changes = {"prediction_type": image.prediction}
        with self.convert_read_errors("its scheduler"):
            return kind.from_config(self.scheduler_settings, **changes)

    def load_encoder_pipeline(self, dtype: Any, *, text: bool = True, vae: bool = False) -> Any:
        import diffusers

        assert self.folder is not None, "a pipeline with random weights has no encoders"
        silence_libraries()
        unused = ("safety_checker", "feature_extractor", "image_encoder")
        parts: dict[str, Any] = {self.family.denoiser: None} | ({} if vae else {VAE: None})
        parts |= {name: None for name in unused if name in self.index}
        if text:
            names = [name for name in self.family.text_encoders if self.index.get(name, [None])[0]]
            parts |= {name: self.load_text_encoder(name, dtype) for name in names}
        else:
            parts |= {name: None for name in self.index if name.startswith(("text_encoder", "tokenizer"))}
        extra = {"requires_safety_checker": False} if self.family.name == "sd" else {}
        kind = getattr(diffusers, self.family.pipeline)
        with self.convert_read_errors("its text encoders, tokenizers or VAE"):
            return kind.from_pretrained(self.folder, dtype=dtype, local_files_only=True, **parts, **extra)

    def load_text_encoder(self, name: str, dtype: Any) -> Any:
        """Load a text encoder. Raises UserError if some of its weights are missing."""
        import transformers

        assert self.folder is not None, "a pipeline with random weights has no encoders"
        with self.convert_read_errors(f"its {name}"):
            model, info = getattr(transformers, self.index[name][1]).from_pretrained(
                self.folder / name, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        if missing := sorted(info["missing_keys"]):
            problem = f"{len(missing)} weights of {name} are missing from its files (first: {missing[0]})"
            raise UserError(f"base_model={self.base_model}: {problem}; copy the pipeline again")
        return model

    def convert_read_errors(self, component: str) -> AbstractContextManager[None]:
        return _convert_read_errors(f"base_model={self.base_model}", component)

    @cached_property
    def index(self) -> dict[str, Any]:
        """Content of model_index.json: the library and the class of each component."""
        return {} if self.folder is None else _read_json(self.folder / INDEX, f"base_model={self.base_model}")

    @cached_property
    def encoders_digest(self) -> str:
        """Hash of the VAE and the text encoders, or the pipeline's name if they are random."""
        if self.folder is None:
            return self.base_model
        digest = xxhash.xxh3_128()
        for part in (VAE, *self.family.text_encoders, "tokenizer", "tokenizer_2", "tokenizer_3"):
            for file in sorted((self.folder / part).glob("*")) if (self.folder / part).is_dir() else ():
                digest.update(f"{part}/{file.name}:{file.stat().st_size}\n".encode())
                with file.open("rb") as stream:
                    digest.update(stream.read(SAMPLED_BYTES))
        return digest.hexdigest()


@contextmanager
def _convert_read_errors(prefix: str, component: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries may raise anything
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
        raise UserError(f"{prefix}: {component} cannot be read ({reason}); copy the pipeline again") from None


def silence_libraries() -> None:
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


def read_pipeline(base_model: str, section: ModelSection) -> Pipeline:
    """Read the pipeline at `base_model`. Raises UserError if it is missing, damaged, or not supported."""
    prefix = f"base_model={base_model}"
    if importlib.util.find_spec("diffusers") is None:
        raise UserError(f"{prefix}: image models need diffusers; pip install diffusers pillow")
    if (published := find_published_shape(base_model)) is not None:
        shape, settings = published
        kind = next(family for family in FAMILIES if family.name == shape.family)
        return Pipeline(base_model, kind, settings, shape.scheduler, None, shape.channels, 8 * kind.packing, shape.text)
    folder = _find_folder(base_model, section)
    components = _read_json(folder / INDEX, prefix)
    name = str(components.get("_class_name"))
    family = find_family(name)
    if family is None:
        names = ", ".join(supported.pipeline for supported in FAMILIES)
        raise UserError(f"{prefix}: {INDEX} names {name}, which is not supported; use {names}")
    _check_components(folder, components, family, prefix)
    vae: VaeSettings = _read_json(folder / VAE / "config.json", prefix, VaeSettings)
    settings = _read_json(folder / family.denoiser / "config.json", prefix)
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json", prefix)
    halvings = len(vae.block_out_channels) - 1
    channels, packing = vae.latent_channels, family.packing
    return Pipeline(base_model, family, settings, scheduler, folder, channels * packing**2, packing * 2**halvings, {})


def _check_components(folder: Path, components: dict[str, Any], family: Family, prefix: str) -> None:
    tokenizers = [name.replace("text_encoder", "tokenizer") for name in family.text_encoders]
    for name in (family.denoiser, VAE, "scheduler", *family.text_encoders, *tokenizers):
        part = components.get(name)
        is_listed = isinstance(part, list) and len(part) == 2 and None not in part
        if is_listed and not (folder / name).is_dir():
            raise UserError(f"{prefix}: {name} is listed in {INDEX}, but missing; copy the complete pipeline")


def _is_single_file(path: Path) -> bool:
    in_model_folder = (path.parent / "config.json").is_file()  # like the weights of a language model
    return path.suffix == ".safetensors" and path.is_file() and not in_model_folder


def _find_folder(base_model: str, section: ModelSection, patterns: Sequence[str] = ("*/*", INDEX)) -> Path:
    """Return the folder of a pipeline; for a Hub ID, download the files that match `patterns`."""
    path = Path(base_model).expanduser()
    if (single := resolve_single_file_pipeline(base_model, section)) is not None:
        return _convert_single_file(path, section, single[0], is_whole=single[1])
    if path.is_dir():
        if not (path / INDEX).is_file():
            raise UserError(f"base_model={base_model}: has no {INDEX}; use the folder of a diffusers pipeline")
        return path
    from huggingface_hub import snapshot_download

    check_source("base_model", base_model)
    disable_retries_without_network(base_model)
    try:
        # Many repositories contain the weights several times, for different tools and precisions.
        ignored = ["*.bin", "*.ckpt", "*.onnx*", "*.msgpack", "*.fp16.safetensors", "*openvino*", "*.png", "*.jpg"]
        found = snapshot_download(
            base_model, revision=section.revision, allow_patterns=list(patterns), ignore_patterns=ignored
        )
    except Exception as error:  # huggingface_hub may raise anything
        raise build_load_error("base_model", base_model, error) from None
    return Path(found)


def resolve_single_file_pipeline(base_model: str, section: ModelSection) -> tuple[str, bool] | None:
    """Return the pipeline that provides the missing parts of a single weights file; None for other models.

    This is `model.pipeline` or, by default, the published pipeline that diffusers recognizes. Also returns
    whether the file contains more than the denoiser.
    """
    if not _is_single_file(file := Path(base_model).expanduser()):
        return None
    import torch
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    entries, _, _ = read_safetensors_header(file)
    shapes = {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items()}
    source = section.pipeline or fetch_diffusers_config(shapes)["pretrained_model_name_or_path"]
    return source, any(name.startswith(("first_stage_model.", "vae.")) for name in entries)


def _convert_single_file(file: Path, section: ModelSection, source: str, *, is_whole: bool) -> Path:
    """Return a folder with the pipeline of a single weights file, converted once by diffusers.

    Settings and tokenizers are taken from the pipeline `source`, and so are all other components if the file contains
    only the denoiser.
    """
    import diffusers
    import torch

    prefix = f"base_model={file}"
    try:
        patterns = [INDEX, "*/*.json", "*/*.txt", "*/*.model"] if is_whole else ["*/*", INDEX]
        origin = _find_folder(source, section, patterns)
    except UserError as error:
        fix = "set model.pipeline to the folder of a pipeline of the same kind"
        raise UserError(f"{prefix}: contains only weights, and its settings were not found ({error}); {fix}") from None
    family = find_family(str(_read_json(origin / INDEX, prefix).get("_class_name")))
    if family is None:
        raise UserError(f"{prefix}: the class of model.pipeline={source} is not supported; use another pipeline")
    kinds = [entry.dtype for entry in read_safetensors_header(file)[0].values()]
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kinds[0] if kinds else "", torch.float32)
    options = {"config": str(origin), "dtype": stored, "local_files_only": True}

    def build(folder: Path) -> None:
        silence_libraries()
        if is_whole:
            getattr(diffusers, family.pipeline).from_single_file(str(file), **options).save_pretrained(folder)
            return
        for part in origin.iterdir():
            if part.name != family.denoiser:
                (folder / part.name).symlink_to(part.resolve())
        denoiser = getattr(diffusers, family.model).from_single_file(str(file), subfolder=family.denoiser, **options)
        denoiser.save_pretrained(folder / family.denoiser)

    identity = f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns} {origin}"
    target = Path("~/.cache/zerolora/pipelines").expanduser() / xxhash.xxh3_128_hexdigest(identity.encode())
    with _convert_read_errors(prefix, f"as {family.pipeline}"):
        return load_or_build(target, build, lambda folder: folder)[0]


def _read_json(file: Path, prefix: str, schema: Any = dict[str, Any]) -> Any:
    name = f"{file.parent.name}/{file.name}" if file.name != INDEX else INDEX
    try:
        return read_json(file, schema)
    except FileNotFoundError:
        raise UserError(f"{prefix}: {name} is missing; copy the complete pipeline") from None
    except UnreadableFileError as error:
        raise UserError(f"{prefix}: {name} {error.problem}; copy it again") from None
