"""Speed of training on images: the tower in the step, cached features, text of as many tokens, and transformers + PEFT.

python -m tests.gpu.vision_speed [--shape 7b|tiny] [--folder PLACE] [--peers PACKAGES] [key=value ...]
A table comes last. With `--peers`, a folder of Unsloth's packages (tests/bench/pack_peers.sh), Unsloth is measured too.
Qwen2.5-VL's shape with random weights and r = 16 on the language model. A step has 4 conversations, each about an image
of 1,024 tokens (896 x 896 pixels), with a question and an answer. PLACE needs 17 GB for the shape of 7B.
The peers' loop is tests/bench/vision_peers.py.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.bench.vision_peers import ANSWER, BATCH, STEPS, WARM_UP
from tests.vision import CHAT, PATCHES, QWEN_TOKENS

IMAGES, QUESTION = 16, 120
PEFT, UNSLOTH = "images, transformers and PEFT", "images, Unsloth"
SIDES = {"7b": 896, "tiny": 112}
SHAPES: dict[str, dict[str, Any]] = {
    "7b": {
        "text_config": {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "num_heads": 16,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "patch_size": 14,
        },
    },
    "tiny": {
        "text_config": {
            "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2,
            "window_size": 112, "fullatt_block_indexes": [1], "patch_size": 14,
        },
    },
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "text of as many tokens": {},
    "images, tower in the step": {},
    "images, cached features": {"vision.cache": True},
}


def make_model(folder: Path, shape: str) -> None:
    """Write random weights, a tokenizer of bytes, and the image processor."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    from trainer.model.random_weights import build_byte_tokenizer

    folder.mkdir(parents=True)
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_TOKENS)})
    tokenizer.chat_template = CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer.save_pretrained(folder)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))
    text = SHAPES[shape]["text_config"] | {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    settings = SHAPES[shape] | {"text_config": text}
    config = AutoConfig.for_model("qwen2_5_vl", **settings, **ids, tie_word_embeddings=False)
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model.save_pretrained(folder)
    processor = {**PATCHES, "max_pixels": 1 << 24}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def write_data(folder: Path, side: int) -> None:
    """Conversations about images of coloured noise, and as long ones without."""
    from PIL import Image

    draw = random.Random(0)
    for number in range(IMAGES):
        small = Image.frombytes("RGB", (32, 32), draw.randbytes(3 * 32 * 32))
        small.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
    tokens = (side // 28) ** 2 + 2
    with (folder / "images.jsonl").open("w") as images, (folder / "texts.jsonl").open("w") as texts:
        for number in range(BATCH * (STEPS + 2)):
            question, answer = ("".join(draw.choices("abcdefgh ", k=size)) for size in (QUESTION, ANSWER))
            for file, start in ((images, "<image>"), (texts, "x" * tokens)):
                turns = [{"role": "user", "content": start + question}, {"role": "assistant", "content": answer}]
                more = {"images": [f"{number % IMAGES}.jpg"]} if file is images else {}
                file.write(json.dumps({"messages": turns, **more}) + "\n")


def measure(folder: Path, name: str, model: Path, more: list[str]) -> tuple[float, float, float]:
    """Tokens per second, milliseconds per step and peak GiB of our training after the warm-up."""
    run = folder / name.replace(" ", "-").replace(",", "")
    settings = {
        "base_model": str(model), "output_dir": str(run), "dataset.cache_dir": str(folder / "cache"),
        "dataset.path": str(folder / ("texts.jsonl" if "text" in name else "images.jsonl")),
        "dataset.max_length": 2048, "training.batch_size": BATCH, "training.max_steps": STEPS, "lora.r": 16,
        "training.save_steps": 0, "training.logging_steps": 1, "training.learning_rate": 1e-5,
        "training.precision": "bf16" if torch.cuda.is_available() else "fp32", "zero.stage": 2,
        "logging.report_to": "none", **CASES[name],
    }  # fmt: skip
    (folder / f"{run.name}.yaml").write_text("{}\n")
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "launcher.cli", "train", str(folder / f"{run.name}.yaml"), *given, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/tokens_per_second" in line][WARM_UP:]
    tokens, step_ms = (median(line[key] for line in steps) for key in ("perf/tokens_per_second", "perf/step_ms"))
    return tokens, step_ms, max(line.get("memory/peak_gib", 0.0) for line in steps)


def measure_peer(peer: str, folder: Path, packages: str = "") -> tuple[float, float, float]:
    """The same for a peer's loop in a process of its own, which sees `packages` first."""
    paths = os.pathsep.join(filter(None, (str(Path.cwd()), packages, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.bench.vision_peers", peer, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    tokens, step_ms, gib = json.loads(done.stdout.splitlines()[-1])
    return tokens, step_ms, gib


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--folder")
    parser.add_argument(
        "--peers", help="also measure Unsloth, with this folder of packages (tests/bench/pack_peers.sh)"
    )
    arguments, more = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        make_model(folder / "model", arguments.shape)
        write_data(folder, SIDES[arguments.shape])
        found = {PEFT: measure_peer("peft", folder)}
        if arguments.peers:
            found[UNSLOTH] = measure_peer("unsloth", folder, arguments.peers)
        for name in CASES:
            found[name] = measure(folder, name, folder / "model", more)
            print(name, found[name], flush=True)
    finally:
        shutil.rmtree(folder)
    text, plain = found["text of as many tokens"][0], found[PEFT][0]
    plain = max(plain, found.get(UNSLOTH, found[PEFT])[0])
    for name, (rate, step_ms, gib) in found.items():
        print(
            f"{name:30} {rate:9,.0f} tokens/s  {rate / plain:.2f} of the peers' best  {rate / text:.3f} of text", end=""
        )
        print(f"  {step_ms:8.1f} ms per step  {gib:6.2f} GiB")


if __name__ == "__main__":
    main()
