"""A random model, a tokenizer and data: small enough for tests, real enough for every library."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import yaml

from trainer.config import RunConfig

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "red green blue seven eight nine runs jumps sleeps the a one cat dog bird over under quickly slowly".split()


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 384 tokens with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def make_model(folder: Path, *, layers: int = 2, hidden: int = 64, seed: int = 0, **changes: object) -> Path:
    """A random Llama with its tokenizer, saved as safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 384,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def write_chats(path: Path, count: int, *, seed: int = 0, longest: int = 12) -> Path:
    """Question and answer pairs of ragged lengths: the answer repeats the question's words in reverse."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            words = [draw.choice(WORDS) for _ in range(draw.randint(2, longest))]
            messages = [
                {"role": "user", "content": " ".join(words)},
                {"role": "assistant", "content": " ".join(reversed(words))},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_training(folder: Path, data: str, training: str, adapters: str = "") -> Path:
    """Write a model, chats, and the file c.yaml, which trains the model on them into `runs`."""
    make_model(folder / "model")
    write_chats(folder / "chats.jsonl", 60)
    (folder / "c.yaml").write_text(
        f"base_model: model\noutput_dir: runs\ndataset: {{path: chats.jsonl, {data}max_length: 64, cache_dir: cache}}\n"
        f"training: {{{training}, batch_size: 2}}\n{adapters}"
    )
    return folder


def record_base(run_dir: Path, config: RunConfig, **more: object) -> None:
    """Write the run.json of a finished run, with the base that it was trained on."""
    from trainer.checkpoint.adapter_files import record_result
    from trainer.checkpoint.base_fingerprint import fingerprint_base
    from trainer.checkpoint.identity import Identity
    from trainer.checkpoint.run_record import write_run_record

    write_run_record(run_dir, config.model_dump_json(), 1, "cpu", "fp32")
    known = Identity(base_model=config.base_model, base=fingerprint_base(config.base_model, config.model))
    record_result(run_dir, [], known.model_dump(mode="json"))
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(record | more))


def write_run(
    folder: Path,
    *,
    chats: int,
    training: Mapping[str, object],
    dataset: Mapping[str, object] | None = None,
    **more: object,
) -> Path:
    """A model, chats and config.yaml of a run with LoRA of rank 4, which reports nowhere; returns the folder."""
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", chats)
    data = {"path": str(folder / "train.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")}
    settings: dict[str, object] = {
        "base_model": str(folder / "model"),
        "output_dir": "unset",
        "lora": {"r": 4},
        "dataset": data | dict(dataset or {}),
        "training": {"learning_rate": 1e-3, **training},
        "logging": {"report_to": "none", "progress": "off"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | more))
    return folder
