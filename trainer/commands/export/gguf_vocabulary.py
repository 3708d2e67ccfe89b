"""Write a tokenizer's vocabulary to GGUF: byte-level BPE, or BPE with byte fallback as sentencepiece produces it.

llama.cpp implements the pre-tokenization rules itself, and GGUF only stores their name, which is found by comparing the
tokenizer's rules with known ones; tokenizers with unknown rules are rejected.
Two differences remain: llama.cpp does not apply NFC normalization (Qwen). For sentencepiece tokenizers it adds a space
even to text that begins with one, and either after all special tokens or after none.
"""

import json
import re
from typing import Any

from gguf import TokenType
from jinja2 import TemplateError

from trainer.config import UserError
from trainer.data.conversations import load_chat_template
from trainer.model.answers import find_end_of_turn

# Pre-tokenization of GPT-4 and its descendants; %s is the rule for digits.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_NAMES = {SPLIT % r"\p{N}{1,3}": "llama-bpe", SPLIT % r"\p{N}": "qwen2"}
# llama.cpp's names for one rule with and without `ignore_merges` (words that are tokens are not split).
WHOLE_WORDS, MERGED_WORDS = "llama-bpe", "smaug-bpe"
USE_SCRIPT = "convert the output of `zerolora merge` with llama.cpp's convert_hf_to_gguf.py"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def add_vocabulary(writer: Any, tokenizer: Any, *, rows: int) -> None:
    """Write tokens, merges, special tokens and the chat template; `rows` is the number of embedding rows.

    Raises UserError if the tokenizer's rules have no known name in llama.cpp.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise UserError(f"--format gguf: tokenizers of type {model['type']} are not supported; {USE_SCRIPT}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_should_add_space(state, tokenizer))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_find_split_name(state))
        writer.add_token_merges(merges)
    tokens, types = _list_tokens(tokenizer, rows)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model.get("byte_fallback"):
        # sentencepiece merges the pair with the best score first, so a token's score is its negative merge rank.
        ranks: dict[str, float] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), -float(rank + 1))
        writer.add_token_scores([ranks.get(token, 0.0 if len(token) == 1 else -1000.0 * rows) for token in tokens])
    for name in ("bos", "eos", "unk", "pad"):
        if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    _add_special_tokens(writer, tokenizer)


def _add_special_tokens(writer: Any, tokenizer: Any) -> None:
    encoded = tokenizer("a").input_ids
    begins = tokenizer.bos_token_id is not None and encoded[:1] == [tokenizer.bos_token_id]
    # Unlike training, llama.cpp would also add the BOS token to chats that do not begin with it.
    chats = _render_example_chats(tokenizer)
    writer.add_add_bos_token(begins and all(chat.startswith(tokenizer.bos_token) for chat in chats))
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and encoded[-1:] == [tokenizer.eos_token_id])
    if template := load_chat_template(tokenizer, None):
        writer.add_chat_template(template)
    if chats:
        # llama.cpp stops at the end of a turn only if it recognizes the token, or if its ID is in the file.
        end = find_end_of_turn(tokenizer)
        if end is not None and end != tokenizer.eos_token_id:
            writer.add_eot_token_id(end)


def _list_tokens(tokenizer: Any, rows: int) -> tuple[list[str], list[TokenType]]:
    """Return the token text and type of every embedding row; rows without a token become unused tokens."""
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


def _render_example_chats(tokenizer: Any) -> list[str]:
    if not tokenizer.chat_template:
        return []
    turns = [{"role": role, "content": "Some words."} for role in ("user", "assistant", "user")]
    options = {"tokenize": False, "add_generation_prompt": True}
    try:
        return [str(tokenizer.apply_chat_template(chat, **options)) for chat in (turns[:1], turns)]
    except TemplateError:
        return []


def _should_add_space(state: dict[str, Any], tokenizer: Any) -> bool:
    """Return whether llama.cpp should add a leading space.

    This is the tokenizer's own setting, unless only the opposite makes llama.cpp tokenize chats as in training.
    Raises UserError for unsupported normalizers or pre-tokenizers.
    """
    normalizers = _list_steps(state["normalizer"], "normalizers")
    splitters = _list_steps(state["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in (*normalizers, *splitters)]
    if unsupported := [kind for kind in kinds if kind not in ("Prepend", "Replace", "Metaspace", "Split")]:
        raise UserError(
            f"--format gguf: byte-fallback tokenizers with {' and '.join(unsupported)} normalizers or pre-tokenizers "
            f"are not supported; {USE_SCRIPT}"
        )
    adds = "Prepend" in kinds or any(step.get("prepend_scheme", "never") != "never" for step in splitters)
    return next((space for space in (adds, not adds) if is_chat_tokenization_identical(tokenizer, space)), adds)


def is_chat_tokenization_identical(tokenizer: Any, adds_space: bool) -> bool:
    """Return whether llama.cpp and the tokenizer produce the same tokens for chats.

    If `space` is set, llama.cpp adds a leading space to every piece between special tokens; tokenizers may add it only
    to the first piece, or not to pieces that begin with a space.
    """
    names = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    pieces = re.compile(f"({'|'.join(map(re.escape, names))})")
    numbers, model = tokenizer.get_vocab(), tokenizer.backend_tokenizer.model
    for chat in _render_example_chats(tokenizer):
        tokens: list[int] = []
        for piece in filter(None, pieces.split(chat)):
            marked = ("▁" if adds_space else "") + piece.replace(" ", "▁")
            tokens += [numbers[piece]] if piece in names else [token.id for token in model.tokenize(marked)]
        if tokens != tokenizer(chat, add_special_tokens=False).input_ids:
            return False
    return True


def has_chat_tokenization_mismatch(tokenizer: Any) -> bool:
    """Return whether llama.cpp tokenizes chats differently from this tokenizer, whether or not it adds a space."""
    if not json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("byte_fallback"):
        return False  # not a sentencepiece tokenizer
    return not any(is_chat_tokenization_identical(tokenizer, space) for space in (True, False))


def _list_steps(step: dict[str, Any] | None, list_key: str) -> list[dict[str, Any]]:
    return [] if step is None else step.get(list_key, [step])


def _find_split_name(state: dict[str, Any]) -> str:
    steps = _list_steps(state["pre_tokenizer"], "pretokenizers")
    changes = [step["type"] for step in _list_steps(state["normalizer"], "normalizers") if step["type"] != "NFC"]
    kinds = [step["type"] for step in steps]
    whole_words = state["model"].get("ignore_merges", False)
    if kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space") and not changes:
        gpt2_rule = steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and gpt2_rule and not whole_words:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and gpt2_rule and not whole_words:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not gpt2_rule:
            name = SPLIT_NAMES.get(steps[0]["pattern"].get("Regex", ""))
            if name == WHOLE_WORDS:
                return WHOLE_WORDS if whole_words else MERGED_WORDS
            if name and not whole_words:
                return name
    raise UserError(
        f"--format gguf: no known llama.cpp pre-tokenizer matches this tokenizer ({' and '.join([*changes, *kinds])}); "
        + USE_SCRIPT
    )
