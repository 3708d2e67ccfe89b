"""Export the adapter without its base model in the target program's layout, and show how to load it."""

import json
import shutil
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter, Keys, LlamaFileType, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES, GGUFType

from trainer.checkpoint.finished_run import ADAPTER_FILES, FinishedRun, load_saved_tokenizer
from trainer.commands.atomic_output import move_into_place, temporary_output
from trainer.commands.export.factors import Factors, read_factors
from trainer.commands.export.gguf import ARCHITECTURES, check_architecture, pair_rotary_rows
from trainer.commands.export.servers import (
    EXPORT_MERGED_FIX,
    build_lora_arguments,
    check_adapter_supported,
    write_for_server,
)
from trainer.config import UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.model.base import load_model_config
from trainer.model.tokenizer_files import read_tokenizer_files, write_files
from trainer.monitor.report.model_card import get_public_name, is_on_hub

ADAPTER_FORMATS = ("peft", "vllm", "sglang", "gguf-lora")


def export_adapter(run: FinishedRun, format_: str, output: Path) -> list[str]:
    """Write the adapter to `output`, a folder (gguf-lora: a file); return lines to print.

    Raises UserError if the target program cannot apply the adapter.
    """
    tokenizer = load_saved_tokenizer(run)  # read before anything is written
    with temporary_output(output) as folder:
        if format_ == "gguf-lora":
            count = write_gguf_lora(run, folder / "adapter.gguf")
            move_into_place(folder / "adapter.gguf", output)
            return [f"A and B of {count} layers in f32", f"llama-server -m BASE.gguf --lora {output}"]
        for name in ADAPTER_FILES:
            shutil.copyfile(run.folder / name, folder / name)
        public = get_public_name(run.config.base_model)
        base = public if is_on_hub(public) else run.config.base_model
        settings = read_adapter_settings(folder) | {"base_model_name_or_path": base}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if format_ != "peft":
            write_for_server(folder, format_, run.config.base_model, run.config.model)
        write_files(read_tokenizer_files(tokenizer), folder)
        move_into_place(folder, output)
    if format_ == "peft":
        return [f"PeftModel.from_pretrained(base, {str(output)!r}) with base {base}"]
    program = {"sglang": "python -m sglang.launch_server --model-path", "vllm": "vllm serve"}[format_]
    return [f"{program} {base} " + " ".join(build_lora_arguments(format_, output, "NAME"))]


def write_gguf_lora(run: FinishedRun, output: Path) -> int:
    """Write the run's adapter to `output`, for `llama-server -m BASE --lora FILE`; return the number of layers.

        blk.0.attn_q.weight.lora_a    A [R, in]
        blk.0.attn_q.weight.lora_b    B [out, R]; rows of q and k in the order of llama.cpp's rotary embedding

    Updates are adapter.lora.alpha / R times B A (llama.cpp's src/llama-adapter.h); all weights share one alpha.
    Raises UserError for an unsupported model or adapter, RuntimeError if tensors are missing when read back.
    """
    check_adapter_supported(run.folder, "gguf-lora")
    config = load_model_config(run.config.base_model, run.config.model)
    check_architecture(config, "gguf-lora")
    factors = read_factors(run.folder, run.config.base_model, run.config.model, complete_groups=False)
    if "lm_head" in factors and config.tie_word_embeddings:
        raise UserError(
            "--format gguf-lora: the adapter changes lm_head, which llama.cpp ties to the embedding of this model; "
            + EXPORT_MERGED_FIX
        )
    rank = max(len(pair.a_RI) for pair in factors.values())
    alpha = max(pair.scale for pair in factors.values()) * rank
    named = {_find_gguf_name(layer, config): _reorder_rotary(layer, pair, config) for layer, pair in factors.items()}
    writer = GGUFWriter(output, MODEL_ARCH_NAMES[ARCHITECTURES[config.architectures[0]][0]])
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_name(run.run_dir.resolve().name)
    for name, pair in named.items():
        pair = pair.rescale(alpha / len(pair.a_RI))
        writer.add_tensor(f"{name}.lora_a", pair.a_RI.float().contiguous().numpy())
        writer.add_tensor(f"{name}.lora_b", pair.b_OR.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if len(GGUFReader(output).tensors) != 2 * len(named):
        raise RuntimeError(f"{output}: does not contain A and B of all {len(named)} layers; check the disk")
    return len(named)


def _find_gguf_name(layer: str, config: Any) -> str:
    names = get_tensor_name_map(ARCHITECTURES[config.architectures[0]][0], config.num_hidden_layers)
    name = names.get_name(f"{layer}.weight", try_suffixes=(".weight",))
    if name is None:
        raise UserError(f"--format gguf-lora: {layer} has no GGUF tensor name; {EXPORT_MERGED_FIX}")
    return str(name)


def _reorder_rotary(layer: str, factors: Factors, config: Any) -> Factors:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    name = layer.rpartition(".")[2]
    if not ARCHITECTURES[config.architectures[0]][1] or name not in heads:
        return factors
    return Factors(factors.a_RI, pair_rotary_rows(factors.b_OR, heads[name]), factors.scale)
