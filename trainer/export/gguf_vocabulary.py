"""A tokenizer's vocabulary as llama.cpp reads it: byte-level BPE, or BPE with byte tokens as sentencepiece makes it.

llama.cpp splits text before BPE by rules of its own that GGUF only names. The name is found from the tokenizer's own
splitting; a tokenizer that splits in another way is refused rather than written under a name that does not fit.
"""

import json
import re
from typing import Any

from gguf import TokenType

from trainer.config import UserError

# The splitting of GPT-4's descendants, %s being how digits are grouped.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES_OF_SPLITS = {SPLIT % r"\p{N}{1,3}": "llama-bpe", SPLIT % r"\p{N}": "qwen2"}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def add_vocabulary(writer: Any, tokenizer: Any, *, rows: int) -> None:
    """Write tokens, merges, special tokens and the chat template; `rows` is the number of rows of the embedding.

    Raises UserError for a tokenizer whose rules have no name in llama.cpp that is known here.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise UserError(f"--format gguf: a tokenizer of type {model['type']} is not written here; use --converter")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_adds_space(state))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of_split(state["pre_tokenizer"]))
        writer.add_token_merges(merges)
    tokens, types = _tokens(tokenizer, rows)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model.get("byte_fallback"):
        # sentencepiece joins the pair with the best score first: the rank of the merge that makes a token.
        ranks: dict[str, float] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), -float(rank + 1))
        writer.add_token_scores([ranks.get(token, 0.0 if len(token) == 1 else -1000.0 * rows) for token in tokens])
    for name in ("bos", "eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    # What encoding puts around a text, seen on one.
    encoded = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and encoded[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and encoded[-1:] == [tokenizer.eos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tokens(tokenizer: Any, rows: int) -> tuple[list[str], list[TokenType]]:
    """Text and kind of every row of the embedding; rows that no token has are filled with unused ones."""
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {index: token.special for index, token in tokenizer.added_tokens_decoder.items()}
    tokens, types = [], []
    for index in range(rows):
        token = by_id.get(index, f"[PAD{index}]")
        if index not in by_id:
            kind = TokenType.UNUSED
        elif index in added:
            kind = TokenType.CONTROL if added[index] else TokenType.USER_DEFINED
        else:
            kind = TokenType.BYTE if BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL
        if index == tokenizer.unk_token_id:
            kind = TokenType.UNKNOWN
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _adds_space(state: dict[str, Any]) -> bool:
    """Whether a space is put before a text, by the normaliser of older files or the splitter of newer ones."""
    normalizer = state["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    splitter = state["pre_tokenizer"] or {}
    prepends = any(step.get("type") == "Prepend" for step in steps)
    return prepends or splitter.get("prepend_scheme", "never") in ("first", "always")


def _name_of_split(splitter: dict[str, Any] | None) -> str:
    """llama.cpp's name of a byte-level tokenizer's splitting."""
    steps = (splitter or {}).get("pretokenizers", [splitter or {}])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and last.get("use_regex", True):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
            name = NAMES_OF_SPLITS.get(steps[0]["pattern"].get("Regex", ""))
            if name:
                return name
    raise UserError(
        f"--format gguf: llama.cpp's name for a tokenizer that splits text by {' and '.join(map(str, kinds))} in this "
        "way is not known here; give llama.cpp's convert_hf_to_gguf.py with --converter"
    )
