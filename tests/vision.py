"""Tiny random models of text and images with their processors, and conversations about generated images."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.multimodal import MROPE, QWEN_VISION, TEXT, VISION
from tests.plain_peft import train_steps, with_adapter
from tests.tiny import make_tokenizer
from trainer.config import RunConfig
from trainer.data.image_parts import decode_image, read_stored
from trainer.data.samples import Sample, split_documents
from trainer.model.base import load_base_model
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

TOWERS = r"model\.(visual|vision_tower|multi_modal_projector)\..*"
"""What is not the language model."""
PROJECTORS = dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("visual.merger",)) | {
    "qwen3_vl": ("visual.merger", "visual.deepstack_merger_list.0"),
    "gemma3": ("multi_modal_projector",),
}
"""What maps image features to embeddings."""
COLOURS = {"red": (220, 20, 30), "green": (20, 180, 40), "blue": (30, 40, 220), "seven": (200, 200, 30)}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
PATCHES: Mapping[str, Any] = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"image_processor_type": "Qwen2VLImageProcessor", **PATCHES},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", **PATCHES},
    "qwen3_vl": {"image_processor_type": "Qwen2VLImageProcessor", **PATCHES},
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4,
    },
}  # fmt: skip


def _settings(family: str, ids: dict[str, int]) -> dict[str, Any]:
    text = TEXT | {"vocab_size": 400}
    if family == "gemma3":
        named = {"image_token_index": ids["image_token"], "boi_token_index": ids["boi_token"]}
        named |= {"eoi_token_index": ids["eoi_token"], "mm_tokens_per_image": 4}
        return {
            "text_config": text | {"sliding_window": 16},
            "vision_config": VISION | {"vision_use_head": False},
            **named,
        }
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    tokens = dict(zip(names, (ids[token] for token in QWEN_TOKENS), strict=True))
    rope = {name: value for name, value in MROPE.items() if name != "mrope_interleaved" or family == "qwen3_vl"}
    vision = {**QWEN_VISION}
    if family == "qwen3_vl":
        vision["deepstack_visual_indexes"] = [0]
    elif family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}
    else:
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    return {"text_config": text | {"rope_parameters": rope}, "vision_config": vision, **tokens}


def make_vision_model(folder: Path, family: str, seed: int = 0, **text: Any) -> Path:
    """A random model of a family, its tokenizer with a template for images, and its image processor."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    make_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    gemma = family == "gemma3"
    tokenizer.add_special_tokens({"additional_special_tokens": list(GEMMA_TOKENS.values() if gemma else QWEN_TOKENS)})
    image = "<start_of_image>" if gemma else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = CHAT.replace("IMAGE", image)
    tokenizer.save_pretrained(folder)
    if gemma:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": GEMMA_TOKENS}))
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA_TOKENS.items()}
    ids |= {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_TOKENS}
    settings = _settings(family, ids)
    settings["text_config"] = settings["text_config"] | text
    torch.manual_seed(seed)
    AutoModelForMultimodalLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4} if gemma else {}))
    return folder


def draw(path: Path, colour: tuple[int, int, int], width: int = 40, height: int = 40) -> Path:
    """An image of one colour with a white corner."""
    from PIL import Image

    image = Image.new("RGB", (width, height), colour)
    image.paste((255, 255, 255), (0, 0, width // 3, height // 3))
    image.save(path)
    return path


def write_vision_chats(
    folder: Path, count: int, *, seed: int = 0, text_only: float = 0.3, one_question: bool = False
) -> Path:
    """Conversations about the colours of one or two images of different sizes, some of them without images.

    With `one_question`, all ask the same about one image.
    """
    draw_number = random.Random(seed)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(count):
            names = [
                draw_number.choice(list(COLOURS)) for _ in range(1 if one_question else draw_number.choice((1, 1, 2)))
            ]
            parts: list[dict[str, Any]] = []
            if number == 0 or draw_number.random() >= text_only:
                for at, name in enumerate(names):
                    sizes = draw_number.choice((30, 60, 90)), draw_number.choice((30, 60))
                    parts.append(
                        {"type": "image", "path": draw(folder / f"{number}-{at}.png", COLOURS[name], *sizes).name}
                    )
            parts.append({"type": "text", "text": "which colour " * (1 if one_question else draw_number.randint(1, 4))})
            turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": " and ".join(names)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder / "chats.jsonl"


def plain_vision_losses(config: RunConfig, *, ranks: int = 1) -> list[float]:
    """Loss of each step by transformers and PEFT, document by document, with inputs of the model's own processor."""
    prepared = prepare(config)
    model = load_base_model(
        config.base_model, config.model, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    set_seed(config.seed)
    kind, train = model.config.model_type, config.vision.train
    excluded, in_full = "nothing" if train == "lora" else TOWERS, PROJECTORS[kind] if train == "projector" else ()
    model, losses = with_adapter(model, config, excluded, [], in_full), list[float]()
    model.train()
    groups = [{"params": [each for each in model.parameters() if each.requires_grad]}]
    for samples in train_steps(groups, config, prepared, ranks=ranks):
        documents = [document for sample in samples for document in split_documents(sample)]
        count = sum(sum(document.trained[1:]) for document in documents)
        total = 0.0
        for document in documents:
            inputs = processed(prepared, document)
            assert inputs["input_ids"].tolist() == [document.input_ids]
            logits = model(**inputs, use_cache=False).logits[0, :-1].float()
            trained = torch.tensor(document.trained[1:], dtype=torch.bool)
            loss = torch.nn.functional.cross_entropy(
                logits[trained], inputs["input_ids"][0, 1:][trained], reduction="sum"
            )
            (loss / count).backward()
            total += loss.item()
        losses.append(total / count)
    return losses


def processed(prepared: Any, document: Sample) -> Any:
    """The inputs that the processor of transformers makes of a document's text and images."""
    text = prepared.tokenizer.decode(document.input_ids, skip_special_tokens=False)
    text = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", text)
    text = re.sub(r"\n\n<start_of_image>(<image_soft_token>)+<end_of_image>\n\n", "<start_of_image>", text)
    images = [decode_image(read_stored(each)[0], "") for part in document.images for each in part]
    assert prepared.images is not None
    return prepared.images._processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
