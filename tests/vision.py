"""Tiny random models of text and images with their processors, and conversations about generated images."""

import json
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.mixtures import store_dequantised
from tests.multimodal import DELTA, MROPE, MULTIMODAL, QWEN_VISION, TEXT, VISION
from tests.plain_peft import train_steps, with_adapter
from tests.tiny import make_tokenizer
from trainer.config import RunConfig
from trainer.data.image_parts import decode_image, read_stored_image
from trainer.data.samples import Sample, split_documents
from trainer.model.base import load_base_model
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

TOWERS = (
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|connector|embed_vision|projector)\..*"
    r"|.*\.feed_forward\.router"
)
"""What is not the language model, and Llama 4's routers, which have no adapter by default."""
MERGERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v")
PROJECTORS = dict.fromkeys(MERGERS, ("visual.merger",)) | {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ("visual.merger", "visual.deepstack_merger_list.0")),
    **dict.fromkeys(
        ("gemma3", "mistral3", "internvl", "llama4", "lfm2_vl", "llava", "pixtral"), ("multi_modal_projector",)
    ),
    **dict.fromkeys(("smolvlm", "idefics3"), ("connector",)),
    "gemma4": ("embed_vision",),
    "paddleocr_vl": ("projector",),
}
"""What maps image features to embeddings."""
COLORS = {"red": (220, 20, 30), "green": (20, 180, 40), "blue": (30, 40, 220), "seven": (200, 200, 30)}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM = {f"{name}_token_id": f"<|{name}|>" for name in ("image", "video")} | {
    f"{name}_{end}_token_id": f"<|{word}_of_{name}|>"
    for name in ("image", "video")
    for end, word in (("start", "begin"), ("end", "end"))
}
BOUNDS = {"<|image_pad|>": QWEN_TOKENS[:2], "<|image|>": ("<|begin_of_image|>", "<|end_of_image|>")}
"""What chat templates write around an image, if anything."""
PATCHES: Mapping[str, Any] = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessor",
}  # fmt: skip
NORMALISED: Mapping[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@dataclass(frozen=True)
class Family:
    """How the tokenizer and the processor of a family write images."""

    image: str
    """What the chat template writes for an image."""
    written: str
    """A pattern of what the processor makes of it."""
    tokens: Mapping[str, str]
    """Special tokens by the names of the tokenizer's settings."""
    images: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)
    named: bool = True
    """Whether the processor finds the tokens by these names."""


QWEN = Family(
    "<|image_pad|>", r"(<\|image_pad\|>)+", dict(zip(QWEN_TOKENS, QWEN_TOKENS, strict=True)), PATCHES, named=False
)
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA_4 = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "video_token": "<|video|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip
INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
MISTRAL = {name: name for name in ("[IMG]", "[IMG_BREAK]", "[IMG_END]")}
LLAMA = {
    name: f"<|{name}|>"
    for name in ("image", "patch", "image_start", "image_end", "tile_x_separator", "tile_y_separator")
}
PLACES = [f"row_{row}_col_{column}" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)]
IDEFICS = {name: f"<{name}>" for name in ("image", "fake_token_around_image", "global-img", *PLACES)}
LFM = {"image": "<image>"} | {
    name: f"<|{name}|>" for name in ("image_start", "image_end", "img_thumbnail", *(f"img_{each}" for each in PLACES))
}
PROCESSORS: dict[str, Family] = dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QWEN
) | {
    "gemma3": Family(
        "<start_of_image>", r"\n\n<start_of_image>(<image_soft_token>)+<end_of_image>\n\n", GEMMA,
        {**NORMALISED, "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28},
         "image_seq_length": 4},
        {"image_seq_length": 4},
    ),
    "gemma4": Family(
        "<|image|>", r"<\|image>(<\|image\|>)+<image\|>", GEMMA_4,
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "pooling_kernel_size": 2,
         "max_soft_tokens": 70},
    ),
    "mistral3": Family(
        "[IMG]", r"(\[IMG\]|\[IMG_BREAK\])+\[IMG_END\]", MISTRAL,
        {**NORMALISED, "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56},
         "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 1}, named=False,
    ),
    "internvl": Family(
        "<IMG_CONTEXT>", r"<img>(<IMG_CONTEXT>)+</img>", INTERN,
        {**NORMALISED, "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56},
         "max_patches": 3},
        {"image_seq_length": 4},
    ),
    "llama4": Family(
        "<|image|>", r"<\|image_start\|>(<\|(image|patch|tile_._separator)\|>)+<\|image_end\|>", LLAMA,
        {**NORMALISED, "image_processor_type": "Llama4ImageProcessor", "size": {"height": 28, "width": 28},
         "max_patches": 4},
        {"patch_size": 14}, named=False,
    ),
    "lfm2_vl": Family(
        "<image>", r"<\|image_start\|>(<image>|<\|img_\w+\|>)+<\|image_end\|>", LFM,
        {**NORMALISED, "image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 14, "tile_size": 28,
         "min_image_tokens": 1, "max_image_tokens": 4, "max_num_patches": 16, "max_tiles": 4,
         "max_pixels_tolerance": 1.0},
        named=False,
    ),
    "llava": Family(
        "<image>", r"(<image>){4}", {"image": "<image>"},
        {**NORMALISED, "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
         "crop_size": {"height": 28, "width": 28}},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}, named=False,
    ),
}  # fmt: skip
for name, kind in (("glm4v", "Glm4v"), ("glm46v", "Glm46V")):
    bounds = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 24}}
    images = {**PATCHES, **bounds, "image_processor_type": f"{kind}ImageProcessor"}
    PROCESSORS[name] = Family("<|image|>", r"(<\|image\|>)+", GLM, images, named=False)
PROCESSORS["paddleocr_vl"] = replace(
    QWEN, tokens={"image_token": "<|image_pad|>"}, named=True,
    images={**PATCHES, "temporal_patch_size": 1, "image_processor_type": "PaddleOCRVLImageProcessor"},
)  # fmt: skip
PROCESSORS["pixtral"] = replace(
    PROCESSORS["mistral3"], processor={**PROCESSORS["mistral3"].processor, "processor_class": "PixtralProcessor"}
)
for name, kind in (("smolvlm", "SmolVLM"), ("idefics3", "Idefics3")):
    PROCESSORS[name] = Family(
        "<image>",
        r"(((<fake_token_around_image><row_\d_col_\d>(<image>)+)+\n)+\n)?"
        r"<fake_token_around_image><global-img>(<image>)+<fake_token_around_image>",
        IDEFICS,
        {**NORMALISED, "image_processor_type": f"{kind}ImageProcessor", "size": {"longest_edge": 56},
         "max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 1}, named=False,
    )  # fmt: skip
PATCHED = [name for name, own in PROCESSORS.items() if "temporal_patch_size" in own.images]
WITH_TORCHVISION = ("mistral3", "pixtral", "llama4", "lfm2_vl")
NO_VISION = "transformers reads its images with torchvision, which is not installed"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _settings(family: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """The configuration of a tiny model; `ids` are those of the family's tokens, by their names."""
    text = TEXT | {"vocab_size": 400}
    if family == "gemma3":
        named = {"image_token_index": ids["image_token"], "boi_token_index": ids["boi_token"]}
        named |= {"eoi_token_index": ids["eoi_token"], "mm_tokens_per_image": 4}
        return {
            "text_config": text | {"sliding_window": 16},
            "vision_config": VISION | {"vision_use_head": False},
            **named,
        }
    if family == "gemma4":
        own = MULTIMODAL[family]
        tokens = {f"{name}_id": ids[name] for name in GEMMA_4}
        more = {"vocab_size": 400, "vocab_size_per_layer_input": 400, "use_bidirectional_attention": "vision"}
        vision = own["vision_config"] | {"pooling_kernel_size": 2}
        return own | {"text_config": own["text_config"] | more, "vision_config": vision} | tokens
    if family == "mistral3":
        own = MULTIMODAL[family]
        vision = own["vision_config"] | {"image_size": 112}
        text |= {"model_type": "mistral"}
        return own | {"text_config": text, "vision_config": vision, "image_token_index": ids["[IMG]"]}
    if family == "internvl":
        vision = VISION | {"image_size": [56, 56], "patch_size": [14, 14]}
        token = {"image_token_id": ids["context_image_token"]}
        return {"text_config": text | {"model_type": "qwen2"}, "vision_config": vision, "image_seq_length": 4, **token}
    if family in ("smolvlm", "idefics3"):
        text |= {"model_type": "llama"}
        return {"text_config": text, "vision_config": VISION, "scale_factor": 2, "image_token_id": ids["image"]}
    if family == "llama4":
        vision = MULTIMODAL[family]["vision_config"] | {"intermediate_size": 128}
        text = MULTIMODAL[family]["text_config"] | {"vocab_size": 400}
        named = {"image_token_index": ids["patch"], "boi_token_index": ids["image_start"]}
        return {"text_config": text, "vision_config": vision, "eoi_token_index": ids["image_end"], **named}
    if family == "lfm2_vl":
        text |= {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": True}
        vision = {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False} | {
            name: value for name, value in VISION.items() if name != "image_size"
        }
        return {"text_config": text, "vision_config": vision, "image_token_id": ids["image"]}
    if family in ("llava", "pixtral"):
        kind = {"llava": "clip_vision_model", "pixtral": "pixtral"}[family]
        vision = VISION | {"model_type": kind} | ({"image_size": 112, "head_dim": 16} if family == "pixtral" else {})
        layer = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} if family == "pixtral" else {}
        text |= {"model_type": "mistral" if family == "pixtral" else "llama"}
        return {"text_config": text, "vision_config": vision, "image_token_index": next(iter(ids.values())), **layer}
    if family.startswith("glm4"):
        text |= {"rope_parameters": MROPE}
        vision = {**QWEN_VISION, "image_size": 56}
        return {"text_config": text, "vision_config": vision, **ids}
    if family == "paddleocr_vl":
        text |= {"rope_parameters": MROPE}
        return {"text_config": text, "vision_config": VISION | {"image_size": 56}, "image_token_id": ids["image_token"]}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    tokens = dict(zip(names, (ids[token] for token in QWEN_TOKENS), strict=True))
    rope = {name: value for name, value in MROPE.items() if name != "mrope_interleaved" or "qwen3" in family}
    vision = {**QWEN_VISION}
    if "qwen3_vl" in family:
        vision["deepstack_visual_indexes"] = [0]
    elif family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}
    elif family == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if "qwen3_5" in family:
        text |= DELTA
        rope |= {"partial_rotary_factor": 1.0}
    if "moe" in family:
        text |= EXPERTS | ({"shared_expert_intermediate_size": 64} if "qwen3_5" in family else {})
    return {"text_config": text | {"rope_parameters": rope}, "vision_config": vision, **tokens}


def make_vision_model(folder: Path, family: str, seed: int = 0, **text: Any) -> Path:
    """A random model of a family, its tokenizer with a template for images, and its image processor."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    make_tokenizer(folder)
    own = PROCESSORS[family]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(own.tokens.values())})
    image = own.image.join(BOUNDS[own.image]) if family in PATCHED else own.image
    tokenizer.chat_template = CHAT.replace("IMAGE", image)
    tokenizer.save_pretrained(folder)
    if own.named:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": dict(own.tokens)}))
    settings = _settings(family, {name: tokenizer.convert_tokens_to_ids(token) for name, token in own.tokens.items()})
    settings["text_config"] = settings["text_config"] | text
    torch.manual_seed(seed)
    kind = "llava" if family == "pixtral" else family
    AutoModelForMultimodalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(own.images))
    (folder / "processor_config.json").write_text(json.dumps(own.processor))
    return folder


def store_dequantised_vision(source: Path, target: Path) -> Path:
    """The model of `source` in 32 bits with the values of NF4, and its tokenizer and processor."""
    store_dequantised(source, target, four_bit=True)
    for file in source.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            shutil.copy(file, target)
    return target


def family_name(model_config: Any) -> str:
    """The key of `PROCESSORS` of a model; Pixtral's model type is LLaVA's."""
    is_pixtral = model_config.model_type == "llava" and model_config.vision_config.model_type == "pixtral"
    return "pixtral" if is_pixtral else model_config.model_type


def draw(path: Path, color: tuple[int, int, int], width: int = 40, height: int = 40) -> Path:
    """An image of one color with a white corner."""
    from PIL import Image

    image = Image.new("RGB", (width, height), color)
    image.paste((255, 255, 255), (0, 0, width // 3, height // 3))
    image.save(path)
    return path


def write_vision_chats(
    folder: Path, count: int, *, seed: int = 0, text_only: float = 0.3, one_question: bool = False
) -> Path:
    """Conversations about the colors of one or two images of different sizes, some of them without images.

    With `one_question`, all ask the same about one image.
    """
    draw_number = random.Random(seed)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(count):
            names = [
                draw_number.choice(list(COLORS)) for _ in range(1 if one_question else draw_number.choice((1, 1, 2)))
            ]
            parts: list[dict[str, Any]] = []
            if number == 0 or draw_number.random() >= text_only:
                for at, name in enumerate(names):
                    sizes = draw_number.choice((30, 60, 90)), draw_number.choice((30, 60))
                    parts.append(
                        {"type": "image", "path": draw(folder / f"{number}-{at}.png", COLORS[name], *sizes).name}
                    )
            parts.append({"type": "text", "text": "which color " * (1 if one_question else draw_number.randint(1, 4))})
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
    kind, train = family_name(model.config), config.vision.train
    excluded = "|".join(config.lora.exclude_modules) or "nothing" if train == "lora" else TOWERS
    in_full = PROJECTORS[kind] if train == "projector" else ()
    model, losses = with_adapter(model, config, excluded, [], in_full), list[float]()
    model.train()
    groups = [{"params": [each for each in model.parameters() if each.requires_grad]}]
    for samples in train_steps(groups, config, prepared, ranks=ranks):
        documents = [document for sample in samples for document in split_documents(sample)]
        count = sum(sum(document.loss_weights[1:]) for document in documents)
        total = 0.0
        for document in documents:
            inputs = processed(prepared, document)
            assert inputs["input_ids"].tolist() == [document.input_ids]
            logits = model(**inputs, use_cache=False).logits[0, :-1].float()
            trained = torch.tensor(document.loss_weights[1:], dtype=torch.bool)
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
    family = PROCESSORS[family_name(prepared.model_config)]
    text = re.sub(family.written, family.image, text)
    images = [decode_image(read_stored_image(each)[0], "") for part in document.images for each in part]
    assert prepared.images is not None
    inputs = prepared.images._processor(
        text=[text], images=images or None, return_tensors="pt", add_special_tokens=False
    )
    return inputs.to(torch.float32)  # Llama 4's images are bf16
