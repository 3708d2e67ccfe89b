"""Merge and export adapters of language and image models, and write the files to upload with them."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainer.checkpoint.finished_run import ADAPTER_FILES, FinishedRun, find_prompt_format, load_saved_tokenizer
from trainer.commands.atomic_output import check_output, move_into_place, temporary_output
from trainer.commands.export.adapters import ADAPTER_FORMATS, export_adapter
from trainer.commands.export.gguf import check_architecture, compute_max_context_length, write_gguf
from trainer.commands.export.gguf_vocabulary import has_chat_tokenization_mismatch
from trainer.commands.export.ollama import build_modelfile
from trainer.commands.merged_model import build_merged_model, merge, save_merged_model
from trainer.config import UserError
from trainer.data.conversations import build_template_variables
from trainer.model.base import load_model_config
from trainer.model.integer_weights import IntegerKind
from trainer.model.saved_adapter import load_adapter, scale_adapter
from trainer.model.tokenizer_files import read_tokenizer_files, write_files
from trainer.monitor.report.sample_images import SAMPLES
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.setup.kinds import ImageKind, LanguageKind, find_adapter_kind
from trainer.setup.text_run import find_task
from trainer.tasks.images.files import DIFFUSERS_FILE, convert_to_kohya
from trainer.tasks.images.model import load_image_model
from trainer.tasks.images.pipeline import read_pipeline, silence_libraries

KOHYA, GGUF_NAME = "lora.safetensors", "model.gguf"


class TextAdapter:
    @staticmethod
    def merge(run: FinishedRun, output: Path, *, dtype: str, scale: float, quantize: IntegerKind | None) -> str:
        """Write the merged model; return a message that shows how to load it."""
        merge(run, output, dtype=dtype, scale=scale, quantize=quantize)
        return f"{output}; load it with {find_task(run.config).auto_class}.from_pretrained({str(output)!r})"

    @staticmethod
    def export(run: FinishedRun, format_: str, output: Path, *, dtype: str) -> list[str]:
        if format_ in ADAPTER_FORMATS:
            return export_adapter(run, format_, output)
        if format_ == "hf":
            merge(run, output, dtype={"f32": "fp32", "f16": "fp16"}.get(dtype, dtype))
            return ["load it with AutoModelForCausalLM.from_pretrained, vLLM or text-generation-inference"]
        return export_gguf(run, format_, output, dtype=dtype)

    @staticmethod
    def write_upload_files(run: FinishedRun, folder: Path) -> None:
        write_files(read_tokenizer_files(load_saved_tokenizer(run)), folder)


class ImageAdapter:
    @staticmethod
    def merge(run: FinishedRun, output: Path, *, dtype: str, scale: float, quantize: object = None) -> str:
        stored = merge_image_adapter(run, output, dtype=dtype, scale=scale)
        return f"{output}; load it with DiffusionPipeline.from_pretrained({str(output)!r}, dtype={stored})"

    @staticmethod
    def export(run: FinishedRun, format_: str, output: Path, *, dtype: str) -> list[str]:
        """Write the adapter for diffusers (`peft`) or ComfyUI and kohya's scripts (`kohya`), or merge it (`hf`)."""
        pipeline = read_pipeline(run.config.base_model, run.config.model)
        if format_ == "hf":
            stored = merge_image_adapter(run, output, dtype="auto", scale=1.0)
            load = f"diffusers.{pipeline.family.pipeline}.from_pretrained({str(output)!r}, dtype={stored})"
            return [f"load it with {load}"]
        with temporary_output(output) as folder:
            if format_ == "kohya":
                save_file(convert_to_kohya(run.folder, pipeline), folder / KOHYA, metadata={"format": "pt"})
            else:
                for name in (*ADAPTER_FILES, DIFFUSERS_FILE):
                    shutil.copyfile(run.folder / name, folder / name)
            move_into_place(folder, output)
        if format_ == "kohya":
            return [f"{output / KOHYA}: for ComfyUI (copy it to models/loras) and programs that read kohya's format"]
        return [f"pipeline.load_lora_weights({str(output)!r})"]

    @staticmethod
    def write_upload_files(run: FinishedRun, folder: Path) -> None:
        """Copy the adapter in diffusers' format and the final sample images to the upload folder."""
        shutil.copyfile(run.folder / DIFFUSERS_FILE, folder / DIFFUSERS_FILE)
        for file in sorted((run.run_dir / SAMPLES).glob("*-after.png")):
            (folder / SAMPLES).mkdir(exist_ok=True)
            shutil.copyfile(file, folder / SAMPLES / file.name)


def export_gguf(run: FinishedRun, format_: str, output: Path, *, dtype: str) -> list[str]:
    """Write the merged model as GGUF (for `ollama`, a folder with a Modelfile), and return lines to print."""
    config = load_model_config(run.config.base_model, run.config.model)
    check_architecture(config)
    model, tokenizer, values = build_merged_model(run)
    with temporary_output(output) as folder:
        file, merged = folder / GGUF_NAME, folder / ".merged"
        save_merged_model(merged, model, tokenizer, values)
        dtype = write_gguf(merged, file, dtype=dtype, name=run.run_dir.resolve().name)
        shutil.rmtree(merged)
        lines = [f"{file.stat().st_size / 2**20:,.1f} MiB in {dtype}, written by the gguf package"]
        if format_ == "gguf":
            move_into_place(file, output)
        else:
            lines += _write_modelfile(run, tokenizer, folder / "Modelfile", output)
            move_into_place(folder, output)
    if (context := compute_max_context_length(config)) < config.max_position_embeddings:
        lines.append(f"context limited to {context:,} tokens: llama.cpp does not support this model's sliding window")
    if has_chat_tokenization_mismatch(tokenizer):
        lines.append("llama.cpp handles spaces after special tokens differently, so it may tokenize chats differently")
    return lines


def _write_modelfile(run: FinishedRun, tokenizer: Any, file: Path, output: Path) -> list[str]:
    prompt, format_ = run.config.dataset.system_prompt, find_prompt_format(run, tokenizer)
    variables = build_template_variables(run.config.dataset)
    text = build_modelfile(GGUF_NAME, tokenizer, system_prompt=prompt, prompt_format=format_, variables=variables)
    file.write_text(text, encoding="utf-8")
    lines = [f"ollama create NAME -f {shlex.quote(str(output / 'Modelfile'))}"]
    if "TEMPLATE" not in text.partition("#")[0]:
        lines.append("TEMPLATE omitted: Ollama cannot format prompts as in training; see the Modelfile")
    if "\n# No SYSTEM" in text:
        lines.append("SYSTEM omitted: Ollama would change the system prompt; see the Modelfile")
    return lines


def merge_image_adapter(run: FinishedRun, output: Path, *, dtype: str, scale: float) -> torch.dtype:
    """Write the pipeline with the adapter merged (W + s B A, computed in fp32 and rounded once); return its dtype.

    The pipeline must be loaded with this dtype, because transformers and diffusers have different defaults.
    Raises UserError if `output` is not empty, or if the base model has random weights.
    """
    check_output(output)
    pipeline = read_pipeline(run.config.base_model, run.config.model)
    if pipeline.folder is None:
        raise UserError(f"base_model={run.config.base_model}: random weights cannot be merged; train on a saved model")
    model = load_image_model(pipeline, run.config.model, dtype=torch.float32, device=torch.device("cpu"))
    adapted = load_adapter(model, str(run.folder), in_fp32=True)
    scale_adapter(adapted, scale)
    merged: Any = adapted.merge_and_unload()
    denoiser = pipeline.family.denoiser
    torch_dtype = _read_stored_dtype(pipeline.folder / denoiser) if dtype == "auto" else DTYPES[dtype]
    silence_libraries()
    with temporary_output(output) as folder:
        for path in pipeline.folder.iterdir():
            if path.is_dir() and path.name != denoiser:
                shutil.copytree(path, folder / path.name)
        shutil.copyfile(pipeline.folder / "model_index.json", folder / "model_index.json")
        merged.denoiser.to(torch_dtype).save_pretrained(folder / denoiser, safe_serialization=True)
        move_into_place(folder, output)
    return torch_dtype


def _read_stored_dtype(folder: Path) -> torch.dtype:
    file = min(folder.glob("diffusion_pytorch_model*.safetensors"))
    with safe_open(str(file), framework="pt") as handle:
        dtype: torch.dtype = handle.get_tensor(next(iter(handle.keys()))).dtype
    return dtype


KINDS: dict[object, type[TextAdapter] | type[ImageAdapter]] = {LanguageKind: TextAdapter, ImageKind: ImageAdapter}


def get_adapter_class(run: FinishedRun) -> type[TextAdapter] | type[ImageAdapter]:
    return KINDS[find_adapter_kind(run)]
