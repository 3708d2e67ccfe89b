"""Merge an image model's adapter into its pipeline, or export it for other programs."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer.checkpoint.finished_run import ADAPTER, FinishedRun
from trainer.commands.atomic_output import check_output, move_into_place, temporary_output
from trainer.config import UserError
from trainer.model.adapter_scale import scale_adapter
from trainer.model.saved_adapter import load_adapter
from trainer.monitor.metrics import Record
from trainer.monitor.report.sample_images import SAMPLES
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.tasks.images.card import image_card
from trainer.tasks.images.files import DIFFUSERS, convert_to_kohya
from trainer.tasks.images.model import load_image_model
from trainer.tasks.images.pipeline import Pipeline, read_pipeline

KOHYA = "lora.safetensors"


def _pipeline(run: FinishedRun) -> Pipeline:
    return read_pipeline(run.config.base_model, run.config.model)


def is_image_run(run: FinishedRun) -> bool:
    """Return whether the run trained an image model: its adapter is also saved in diffusers' format."""
    return (run.folder / DIFFUSERS).is_file()


def refuse_images(run: FinishedRun, reason: str) -> None:
    """Raise UserError for an image model, in commands for language models only."""
    if is_image_run(run):
        raise UserError(f"{run.folder}: the adapter belongs to an image model, and {reason}")


def export_images(run: FinishedRun, form: str, output: Path) -> list[str]:
    """Write the adapter for diffusers (`peft`) or ComfyUI and kohya's scripts (`kohya`), or merged (`hf`).

    Returns lines on how to use it.
    """
    pipeline = _pipeline(run)
    if form == "hf":
        merge_images(run, output, dtype="auto", scale=1.0)
        return [f"{pipeline.family.pipeline}.from_pretrained({str(output)!r}) of diffusers loads it"]
    if form not in ("peft", "kohya"):
        refuse_images(run, f"--format {form} is for language models")
    with temporary_output(output) as folder:
        if form == "kohya":
            save_file(convert_to_kohya(run.folder, pipeline), folder / KOHYA, metadata={"format": "pt"})
        else:
            for name in (*ADAPTER, DIFFUSERS):
                shutil.copyfile(run.folder / name, folder / name)
        move_into_place(folder, output)
    if form == "kohya":
        return [f"{output / KOHYA}: for ComfyUI's models/loras, and programs that read kohya's format"]
    return [f"pipeline.load_lora_weights({str(output)!r})"]


def copy_image_files(run: FinishedRun, folder: Path) -> None:
    """Copy the adapter in diffusers' format and the final sample images, for an upload."""
    shutil.copyfile(run.folder / DIFFUSERS, folder / DIFFUSERS)
    for file in sorted((run.run_dir / SAMPLES).glob("*-after.png")):
        (folder / SAMPLES).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / SAMPLES / file.name)


def image_model_card(run: FinishedRun, records: list[Record], name: str) -> str:
    """Return the model card of an image model's adapter."""
    return image_card(run.config, _pipeline(run), records, name)


def merge_images(run: FinishedRun, output: Path, *, dtype: str, scale: float) -> Path:
    """Write the pipeline with the adapter merged, W + s B A in 32 bits, rounded once.

    Raises UserError if `output` is not empty, or the base is random.
    """
    check_output(output)
    pipeline = _pipeline(run)
    if pipeline.folder is None:
        raise UserError(f"base_model={run.config.base_model}: a random pipeline has nothing to merge into")
    model = load_image_model(pipeline, run.config.model, dtype=torch.float32, device=torch.device("cpu"))
    adapted = load_adapter(model, str(run.folder), in_32_bits=True)
    scale_adapter(adapted, scale)
    merged: Any = adapted.merge_and_unload()
    denoiser = pipeline.family.denoiser
    kept = _stored_dtype(pipeline.folder / denoiser) if dtype == "auto" else DTYPES[dtype]
    with temporary_output(output) as folder:
        for path in pipeline.folder.iterdir():
            if path.is_dir() and path.name != denoiser:
                shutil.copytree(path, folder / path.name)
        shutil.copyfile(pipeline.folder / "model_index.json", folder / "model_index.json")
        merged.denoiser.to(kept).save_pretrained(folder / denoiser, safe_serialization=True)
        move_into_place(folder, output)
    return output


def _stored_dtype(folder: Path) -> torch.dtype:
    from safetensors import safe_open

    file = next(iter(sorted(folder.glob("diffusion_pytorch_model*.safetensors"))))
    with safe_open(str(file), framework="pt") as handle:
        found: torch.dtype = handle.get_tensor(next(iter(handle.keys()))).dtype
    return found
