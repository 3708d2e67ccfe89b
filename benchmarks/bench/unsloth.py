"""Unsloth's model for `benchmarks.bench.peers`: loaded as its users do, from a sparse checkpoint.

Unsloth reads a folder. Writing and reading 16 GB of random numbers would take most of the measurement's time, so the
weights in the file are a hole (zeros that take no disk space) and are drawn on the card afterwards.
"""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.assignment import Case
from trainer.config import ModelSection
from trainer.model.base import build_empty_model, load_model_config


def load_unsloth_model(case: Case, folder: Path) -> Any:
    """Load Unsloth's model from a sparse checkpoint of zeros and draw its weights in place."""
    from unsloth import FastLanguageModel

    path = folder / "unsloth" / case.base_model.replace(":", "-")
    if not (path / "config.json").exists():
        write_sparse_checkpoint(case.base_model, path)
    model, _ = FastLanguageModel.from_pretrained(
        str(path), max_seq_length=case.length, dtype=torch.bfloat16, load_in_4bit=case.four_bit
    )
    draw_weights(model)
    targets = case.targets
    if targets == ["all-linear"]:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return FastLanguageModel.get_peft_model(
        model,
        r=case.rank,
        lora_alpha=case.alpha,
        lora_dropout=0,
        bias="none",
        target_modules=targets,
        use_gradient_checkpointing="unsloth" if case.recompute else False,
        max_seq_length=case.length,
    )


def write_sparse_checkpoint(base_model: str, folder: Path) -> None:
    """Write config.json, a tokenizer, and a sparse safetensors file that reads as bf16 zeros."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = load_model_config(base_model, ModelSection())
    model = build_empty_model(config, ModelSection())
    model.tie_weights()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, parameter in model.named_parameters():
        size = 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)


def draw_weights(model: torch.nn.Module) -> None:
    """Draw every weight as in trainer/model/random_weights.py; bitsandbytes quantizes 4-bit ones again.

    The speed of a product depends on its values (the fewer bits change, the less power it draws, and the clock follows
    the power), so the peers must have weights like ours.
    """
    from bitsandbytes.functional import quantize_4bit

    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            weight = torch.empty(state.shape, dtype=torch.bfloat16, device=parameter.device).normal_(std=0.02)
            packed, fresh = quantize_4bit(
                weight,
                blocksize=state.blocksize,
                quant_type=state.quant_type,
                compress_statistics=state.nested,
                quant_storage=parameter.dtype,
            )
            parameter.data.copy_(packed.view_as(parameter))
            state.absmax.copy_(fresh.absmax)
            if state.nested:
                state.offset.copy_(fresh.offset)
                state.state2.absmax.copy_(fresh.state2.absmax)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=0.02)
        else:
            parameter.data.fill_(1.0)
