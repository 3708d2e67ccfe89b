"""Speed of training on images: the tower in the step, cached features, text of as many tokens, and transformers + PEFT.

python -m tests.gpu.vision_speed [--shape 7b|tiny] [--folder PLACE] [key=value ...]     a table comes last
Qwen2.5-VL's shape with random weights and r = 16 on the language model. A step has 4 conversations, each about an image
of 1,024 tokens (896 x 896 pixels), with a question and an answer. PLACE needs 17 GB for the shape of 7B.
The loop of transformers and PEFT has sdpa, bf16, gradient checkpointing, fused AdamW, and inputs that are ready.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.vision import CHAT, PATCHES, QWEN_TOKENS

BATCH, STEPS, WARM_UP, IMAGES = 4, 14, 5, 16
QUESTION, ANSWER = 120, 280
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


def measure_peft(folder: Path, model_folder: Path) -> tuple[float, float, float]:
    """The same for a plain loop of transformers and PEFT in this process."""
    from peft import LoraConfig, get_peft_model
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForMultimodalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = AutoModelForMultimodalLM.from_pretrained(model_folder, dtype=dtype, attn_implementation="sdpa").to(device)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", exclude_modules=r".*visual.*")
    model = get_peft_model(base, settings, autocast_adapter_dtype=False).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    tokenizer, processor = (kind.from_pretrained(model_folder) for kind in (AutoTokenizer, AutoImageProcessor))
    lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    times, tokens = list[float](), 0
    for step in range(STEPS):
        part = lines[step * BATCH : (step + 1) * BATCH]
        images = [Image.open(folder / line["images"][0]) for line in part]
        inputs = dict(processor(images, return_tensors="pt"))
        count = int(inputs["image_grid_thw"][0].prod()) // 4
        pads = "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"
        texts = [
            tokenizer.apply_chat_template(line["messages"], tokenize=False).replace("<image>", pads) for line in part
        ]
        ids = tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]
        labels = ids.clone()
        labels[:, : -ANSWER - 3] = -100
        inputs |= {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == base.config.image_token_id).long()}
        inputs = {name: value.to(device) for name, value in inputs.items()}
        _wait(device)
        begun = time.perf_counter()
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append(time.perf_counter() - begun)
        tokens = ids.numel()
    seconds = median(times[WARM_UP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return tokens / seconds, 1000 * seconds, peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--folder")
    parser.add_argument("--peft", action="store_true", help="only the loop of transformers and PEFT, in this process")
    arguments, more = parser.parse_known_args()
    if arguments.peft:
        print(json.dumps(measure_peft(Path(arguments.folder), Path(arguments.folder) / "model")))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        make_model(folder / "model", arguments.shape)
        write_data(folder, SIDES[arguments.shape])
        command = [sys.executable, "-m", "tests.gpu.vision_speed", "--peft", "--folder", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        found = {"images, transformers and PEFT": tuple(json.loads(done.stdout.splitlines()[-1]))}
        for name in CASES:
            found[name] = measure(folder, name, folder / "model", more)
            print(name, found[name], flush=True)
    finally:
        shutil.rmtree(folder)
    text, plain = found["text of as many tokens"][0], found["images, transformers and PEFT"][0]
    for name, (rate, step_ms, gib) in found.items():
        print(f"{name:30} {rate:9,.0f} tokens/s  {rate / plain:.2f} of PEFT  {rate / text:.3f} of text", end="")
        print(f"  {step_ms:8.1f} ms per step  {gib:6.2f} GiB")


if __name__ == "__main__":
    main()
