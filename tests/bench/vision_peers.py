"""The peers' side of tests.gpu.vision_speed: a training loop of transformers with PEFT, or with Unsloth's model.

python -m tests.bench.vision_peers peft|unsloth FOLDER     [tokens/s, ms per step, peak GiB] as JSON
FOLDER has `model` and `images.jsonl`, as vision_speed writes them. Nothing of zerolora is imported, for Unsloth has
packages of its own: vision_speed starts this with them on PYTHONPATH (`--peers`; pack_peers.sh makes the archive).
Both have bf16, gradient checkpointing, r = 16 on the language model, fused AdamW, and inputs that are ready.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

BATCH, STEPS, WARM_UP = 4, 14, 5
ANSWER = 280
"""Characters of an answer, each of which is a token."""
RANK, ALPHA, LENGTH = 16, 32, 2048


def load_peft(model_folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the model with sdpa and an adapter of PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForMultimodalLM

    base = AutoModelForMultimodalLM.from_pretrained(model_folder, dtype=dtype, attn_implementation="sdpa").to(device)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", exclude_modules=r".*visual.*")
    return get_peft_model(base, settings, autocast_adapter_dtype=False)


def load_unsloth(model_folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the model with FastVisionModel, as Unsloth's notebooks do."""
    from unsloth import FastVisionModel

    model, _ = FastVisionModel.from_pretrained(
        str(model_folder),
        max_seq_length=LENGTH,
        dtype=dtype,
        load_in_4bit=False,
        use_gradient_checkpointing="unsloth",
    )
    model = FastVisionModel.get_peft_model(
        model,
        finetune_vision_layers=False,
        finetune_language_layers=True,
        finetune_attention_modules=True,
        finetune_mlp_modules=True,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0,
        bias="none",
    )
    FastVisionModel.for_training(model)
    return model.to(device)


PEERS = {"peft": load_peft, "unsloth": load_unsloth}


def build_inputs(tokenizer: Any, processor: Any, lines: list[dict[str, Any]], folder: Path, token: int) -> Any:
    """Build the inputs of a batch of conversations; `token` is that of images."""
    from PIL import Image

    inputs = dict(processor([Image.open(folder / line["images"][0]) for line in lines], return_tensors="pt"))
    count = int(inputs["image_grid_thw"][0].prod()) // 4
    pads = "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False).replace("<image>", pads) for line in lines]
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    ids = encoded["input_ids"]
    labels = ids.clone()
    labels[:, : -ANSWER - 3] = -100
    types = (ids == token).long()
    return inputs | {
        "input_ids": ids, "attention_mask": encoded["attention_mask"], "labels": labels, "mm_token_type_ids": types
    }  # fmt: skip


def measure(peer: str, folder: Path) -> tuple[float, float, float]:
    """Return tokens per second, milliseconds per step and peak GiB after the warm-up."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = PEERS[peer](folder / "model", device, torch.bfloat16 if on_gpu else torch.float32).train()
    from transformers import AutoImageProcessor, AutoTokenizer  # Unsloth must be imported before transformers

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names and not any("visual" in name for name in names), "adapters on the language model alone"
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=on_gpu)
    tokenizer, processor = (kind.from_pretrained(folder / "model") for kind in (AutoTokenizer, AutoImageProcessor))
    lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    times, tokens = list[float](), 0
    for step in range(STEPS):
        part = lines[step * BATCH : (step + 1) * BATCH]
        inputs = build_inputs(tokenizer, processor, part, folder, model.config.image_token_id)
        tokens = inputs["input_ids"].numel()
        inputs = {name: value.to(device) for name, value in inputs.items()}
        synchronize(device)
        begun = time.perf_counter()
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        times.append(time.perf_counter() - begun)
        assert torch.isfinite(loss)
    seconds = median(times[WARM_UP:])
    return tokens / seconds, 1000 * seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
