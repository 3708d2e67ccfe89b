"""Export of the merged model as one GGUF file, alone or with a Modelfile for Ollama."""

import shlex
import shutil
from pathlib import Path
from typing import Any

from trainer.checkpoint.finished_run import FinishedRun, find_prompt_form
from trainer.commands.atomic_output import move_into_place, temporary_output
from trainer.commands.export.gguf import check_architecture, max_context_length, write_gguf
from trainer.commands.export.gguf_vocabulary import chats_differ
from trainer.commands.export.ollama import modelfile
from trainer.commands.merged_model import build_merged, save_merged
from trainer.data.conversations import build_template_variables
from trainer.model.base import load_model_config

GGUF_NAME = "model.gguf"


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
    variables = build_template_variables(run.config.dataset)
    text = modelfile(GGUF_NAME, tokenizer, system_prompt=system_prompt, form=form, variables=variables)
    file.write_text(text, encoding="utf-8")
    lines = [f"ollama create NAME -f {shlex.quote(str(output / 'Modelfile'))}"]
    if "TEMPLATE" not in text.partition("#")[0]:
        lines.append("without TEMPLATE: Ollama cannot format prompts as this run trained them; see the Modelfile")
    if "\n# No SYSTEM" in text:
        lines.append("without SYSTEM: Ollama would change the system prompt; see the Modelfile")
    return lines
