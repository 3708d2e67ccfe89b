"""`python -m trainer.commands.export RUN --format FORMAT`: export a trained adapter for other programs.

peft, vllm, sglang: the adapter with its tokenizer, in the layout that each loads. gguf-lora: the adapter as one file
for llama.cpp. hf: the merged model in safetensors. gguf: the merged model as one file for llama.cpp. ollama: that file
with a Modelfile. kohya: an image model's adapter for ComfyUI.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from trainer.checkpoint.finished_run import (
    FinishedRun,
    add_run_arguments,
    find_run,
    quiet_libraries,
    refuse_reward_model,
)
from trainer.commands.atomic_output import check_output, move_into_place, temporary_output
from trainer.commands.export.adapters import ADAPTER_FORMS, export_adapter
from trainer.commands.export.gguf import FORMATS, check_architecture, max_context_length, write_gguf
from trainer.commands.export.gguf_vocabulary import chats_differ
from trainer.commands.export.ollama import modelfile
from trainer.commands.generate import find_prompt_form
from trainer.commands.image_adapter import export_images, is_image_run
from trainer.commands.merge import build_merged, merge, save_merged
from trainer.config import CommandParser, UserError, reports_errors
from trainer.data.conversations import template_variables
from trainer.model.base import load_model_config

GGUF_NAME = "model.gguf"
FILES = {"gguf": GGUF_NAME, "gguf-lora": "adapter.gguf"}
"""Formats that are a single file."""


def export_gguf(run: FinishedRun, form: str, output: Path, *, dtype: str) -> list[str]:
    """Write the merged model as one GGUF file, for `ollama` in a folder with a Modelfile; return what to print."""
    config = load_model_config(run.config.base_model, run.config.model)
    check_architecture(config)
    model, tokenizer, values = build_merged(run)
    with temporary_output(output) as folder:
        file, merged = folder / GGUF_NAME, folder / ".merged"
        save_merged(merged, model, tokenizer, values)
        dtype = write_gguf(merged, file, dtype=dtype, name=run.run_dir.resolve().name)
        shutil.rmtree(merged)
        lines = [f"{file.stat().st_size / 2**20:,.1f} MiB in {dtype}, written by the gguf package"]
        if form == "gguf":
            move_into_place(file, output)
        else:
            lines += _write_modelfile(run, tokenizer, folder / "Modelfile", output)
            move_into_place(folder, output)
    if (context := max_context_length(config)) < config.max_position_embeddings:
        lines.append(f"context of {context:,} tokens, the model's sliding window, which llama.cpp does not support")
    if chats_differ(tokenizer):
        lines.append("llama.cpp handles spaces after special tokens differently, so tokens of chats may differ")
    return lines


def _write_modelfile(run: FinishedRun, tokenizer: Any, file: Path, output: Path) -> list[str]:
    system_prompt, form = run.config.dataset.system_prompt, find_prompt_form(run, tokenizer)
    variables = template_variables(run.config.dataset)
    text = modelfile(GGUF_NAME, tokenizer, system_prompt=system_prompt, form=form, variables=variables)
    file.write_text(text, encoding="utf-8")
    lines = [f"ollama create NAME -f {shlex.quote(str(output / 'Modelfile'))}"]
    if "TEMPLATE" not in text.partition("#")[0]:
        lines.append("without TEMPLATE: Ollama cannot format prompts as this run trained them; see the Modelfile")
    if "\n# No SYSTEM" in text:
        lines.append("without SYSTEM: Ollama would change the system prompt; see the Modelfile")
    return lines


def export(run: FinishedRun, form: str, output: Path, *, dtype: str = "auto") -> list[str]:
    """Write the run's adapter in format `form` to `output`; return what to print. Raises UserError, RuntimeError."""
    if form in FILES and output.is_dir():
        raise UserError(f"{output}: is a folder, but --format {form} writes a file; --output {output / FILES[form]}")
    check_output(output)
    if is_image_run(run):
        return export_images(run, form, output)
    if form != "peft":
        refuse_reward_model(run, f"--format {form} is for models that write text; use peft, or `zerolora merge`")
    if form == "kohya":
        raise UserError("--format kohya: is for image models, and this run trained a language model; use peft")
    if form in ADAPTER_FORMS:
        return export_adapter(run, form, output)
    if form == "hf":
        merge(run, output, dtype={"f32": "fp32", "f16": "fp16"}.get(dtype, dtype))
        return ["AutoModelForCausalLM.from_pretrained, vLLM and text-generation-inference load it"]
    return export_gguf(run, form, output, dtype=dtype)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="zerolora export", description="Export a trained adapter for other programs.")
    add_run_arguments(parser, "location of the full-precision base, if it was moved")
    formats = (*ADAPTER_FORMS, "hf", "gguf", "ollama", "kohya")
    parser.add_argument("--format", choices=formats, required=True, help="the form that the other program reads")
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="file for gguf and gguf-lora, else folder (RUN/export-FORMAT)"
    )
    parser.add_argument(
        "--dtype", choices=("auto", *FORMATS), default="auto", help="dtype of the weights (auto: as the base is stored)"
    )
    return parser.parse_args(argv)


@reports_errors(RuntimeError)
def main(argv: list[str] | None = None) -> None:
    options = _parse(argv)
    quiet_libraries()
    names = {"gguf": "export.gguf", "gguf-lora": "export-lora.gguf"}
    output = options.output or options.run / names.get(options.format, f"export-{options.format}")
    if options.dtype != "auto" and options.format in ADAPTER_FORMS:
        raise UserError(f"--dtype {options.dtype}: --format {options.format} keeps the adapter's dtype; remove it")
    if options.dtype == "q8_0" and options.format == "hf":
        raise UserError(f"--dtype q8_0: is for GGUF files, not for --format {options.format}; remove it")
    needs_base = options.format != "peft"
    run = find_run(options.run, options.base_model, needs_base=needs_base, allow_mismatch=options.allow_mismatch)
    lines = export(run, options.format, output, dtype=options.dtype)
    print(f"exported to {output}")
    for line in lines:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
