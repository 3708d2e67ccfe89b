"""Published chat templates, a tokenizer that knows the special tokens of each, and conversations to render."""

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "data" / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
# Control tokens, and tags that tokenizers have as tokens of their own which are not special.
_TOKEN = re.compile(
    "<\uff5c[^\uff5c<>]{1,40}\uff5c>|"  # DeepSeek's bars
    r"<\|[^|<>{}'\" ]{1,40}\|>|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|<end_of_utterance>|<sop>|<seed:[be]os>|"
    r"\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|gMASK|CALL_ID|TOOL_CONTENT)\]"
)
_TAG = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Look.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "turns": [turn("user", "Red?"), turn("assistant", "Blue."), turn("user", "Nine?"), turn("assistant", "<Ten.")],
    "system": [turn("system", "Be brief."), turn("user", "Red?"), turn("assistant", "Blue.")],
    "reasoning": [
        turn("user", "Red?"),
        turn("assistant", "Blue.", reasoning_content="Hm."),
        turn("user", "Nine?"),
        turn("assistant", "Ten.", reasoning_content="So."),
    ],
    "tools": [
        turn("user", "Rain?"),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "Dry.", tool_call_id="call12345", name="weather"),
        turn("assistant", "No."),
    ],
    "call": [turn("user", "Rain?"), turn("assistant", "", tool_calls=[CALL])],
}


def source(name: str) -> str:
    """Return a template's text."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def make_tokenizer(template: str, eos: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges that has the template's tokens."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<BOS>", eos_token=eos, pad_token="<PAD>")
    tokenizer.add_tokens(sorted(set(_TAG.findall(template))))
    tokenizer.add_tokens(sorted(set(_TOKEN.findall(template))), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer
