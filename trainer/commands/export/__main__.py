"""`zerolora export RUN --format FORMAT`: export a trained adapter for other programs.

peft, vllm, sglang: the adapter in that program's layout, with its tokenizer. gguf-lora: the adapter as one file
for llama.cpp. hf: the merged model in safetensors. gguf: the merged model as one file for llama.cpp. ollama: a GGUF
file with a Modelfile. kohya: an image model's adapter for ComfyUI.
"""

from pathlib import Path

from trainer.checkpoint.finished_run import FinishedRun, add_run_arguments, find_run, silence_libraries
from trainer.commands.adapter_kinds import GGUF_NAME, get_adapter_class
from trainer.commands.atomic_output import check_output
from trainer.commands.export.adapters import ADAPTER_FORMATS
from trainer.commands.export.gguf import FORMATS
from trainer.config import CommandParser, UserError, reports_errors
from trainer.setup.kinds import find_task_class

FILES = {"gguf": GGUF_NAME, "gguf-lora": "adapter.gguf"}
"""Formats that consist of a single file, and the suggested file name."""


def export(run: FinishedRun, format_: str, output: Path, *, dtype: str = "auto") -> list[str]:
    if format_ in FILES and output.is_dir():
        file = output / FILES[format_]
        raise UserError(f"{output}: is a folder, but --format {format_} needs a file; use --output {file}")
    check_output(output)
    task = find_task_class(run)
    if format_ not in task.formats:
        known = ", ".join(task.formats)
        raise UserError(f"--format {format_}: {run.folder} is an adapter of {task.title}; use --format {known}")
    return get_adapter_class(run).export(run, format_, output, dtype=dtype)


@reports_errors(RuntimeError)
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora export", description="Export a trained adapter for other programs.")
    add_run_arguments(parser, "location of the full-precision base model, if it was moved")
    formats = (*ADAPTER_FORMATS, "hf", "gguf", "ollama", "kohya")
    parser.add_argument("--format", choices=formats, required=True, help="the format that the other program reads")
    output_help = "folder or GGUF file (default: RUN/export-FORMAT, RUN/export.gguf or RUN/export-lora.gguf)"
    parser.add_argument("--output", type=Path, metavar="PATH", help=output_help)
    parser.add_argument(
        "--dtype",
        choices=("auto", *FORMATS),
        default="auto",
        help="dtype of the weights (auto: as stored in the base model)",
    )
    options = parser.parse_args(argv)
    silence_libraries()
    names = {"gguf": "export.gguf", "gguf-lora": "export-lora.gguf"}
    output = options.output or options.run / names.get(options.format, f"export-{options.format}")
    if options.dtype != "auto" and options.format in ADAPTER_FORMATS:
        raise UserError(f"--dtype {options.dtype}: --format {options.format} keeps the adapter's dtype; remove --dtype")
    if options.dtype == "q8_0" and options.format == "hf":
        raise UserError("--dtype q8_0: is only for GGUF files; remove --dtype, or use --format gguf")
    needs_base = options.format != "peft"
    run = find_run(options.run, options.base_model, needs_base=needs_base, allow_mismatch=options.allow_mismatch)
    lines = export(run, options.format, output, dtype=options.dtype)
    print(f"exported to {output}")
    for line in lines:
        print(f"  {line}")
