"""Find the turn to which each character of a rendered chat belongs, for any chat template.

A chat template is a program. It may put a system prompt before the first turn, trim content, or drop the reasoning of
all but the last answer. So a conversation rendered up to turn i is not always a prefix of the complete rendering, and a
turn's text may not occur there. But all templates loop over the messages. `mark_template` puts a marker at the start of
each loop body and after each loop; in the rendering, the markers show where every turn begins and ends. `{% generation
%}` blocks are marked in the same way, and so are the texts of the turns (`mark_message`), to separate them from the
tags around them. `parse_markers` removes the markers; its caller compares the rest with an unmarked rendering.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment

# Message key for the turn's number, which the marked template reads.
TURN_KEY = "zerolora_turn"
# Noncharacters, which no valid text contains (https://www.unicode.org/faq/private_use.html#noncharacters).
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKER = re.compile(f"{_OPEN}(\\d+|generation|endgeneration|(?:end)?(?:text|reasoning)):(\\d*){_CLOSE}")
# Reasoning in an answer. The first block may lack <think>, which the prompt may contain; the last may lack </think>.
_INLINE_REASONING = re.compile(r"(\A(?=(?:(?!<think>).)*?</think>)|<think>\s*)(.*?)(\s*</think>\s*|\Z)", re.DOTALL)
# The tags around reasoning, with adjacent whitespace.
_OPEN_TAG, _CLOSE_TAG = r"[<\[][\w:|]*think[\w:|]*[>\]]", r"[<\[]/[\w:|]*think[\w:|]*[>\]]"
_OPENED, _CLOSED = re.compile(rf"\s*{_OPEN_TAG}\s*\Z", re.IGNORECASE), re.compile(rf"\s*{_CLOSE_TAG}\s*", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(rf"(?:(?<!\s)\s*{_OPEN_TAG}\s*)?{_CLOSE_TAG}\s*", re.IGNORECASE)
MAX_TAG_LENGTH = 40
Spans = dict[int, list[tuple[int, int]]]


@dataclass(frozen=True)
class ChatSpans:
    """A rendered chat without its markers; spans are [start, end) in characters.

    `turns[i]`: spans rendered by loop iterations over message i, in order. `texts[i]` and `reasoning[i]`: spans of its
    text and reasoning. `generation`: spans of generation blocks.
    """

    text: str
    turns: Spans
    generation: list[tuple[int, int]]
    texts: Spans
    reasoning: Spans


@lru_cache(maxsize=16)
def mark_template(source: str) -> str:
    """Return the template with markers at the start of each loop body and generation block, and after their ends.

    Raises jinja2.TemplateSyntaxError if the template cannot be parsed.
    """
    # The same options as in transformers, since they determine the whitespace that tags strip. The lexer already strips
    # it, so text is written as output expressions, from which tags strip nothing.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    pieces = ["{% set zerolora_namespace = namespace %}"]  # a macro may have a parameter called namespace
    tag: list[tuple[str, str]] = []
    begin = loops = 0
    open_loops: list[int | None] = []
    for _, kind, value in environment.lex(source):
        if kind in ("raw_begin", "raw_end", "comment_begin", "comment", "comment_end"):
            continue
        pieces.append(_quote_literal(value) if kind == "data" else value)
        if kind == "block_begin":
            tag, begin = [], len(pieces) - 1
        elif kind == "block_end":
            words = [word for word_kind, word in tag if word_kind in ("name", "operator")]
            if words[:1] == ["for"]:
                # `for key, value in ...` does not loop over messages; other loops are checked during rendering.
                open_loops.append(loops if words[2:3] == ["in"] else None)
                if open_loops[-1] is not None:
                    pieces.insert(begin, f"{{% set zerolora_{loops} = zerolora_namespace(turns=false) %}}")
                    pieces.append(_build_loop_marker(loops, words[1]))
                loops += 1
            elif words[:1] == ["endfor"] and open_loops:
                loop = open_loops.pop()
                if loop is not None:
                    pieces.append(f"{{{{ '{_build_marker(f'{loop}:')}' if zerolora_{loop}.turns }}}}")
            elif words[:1] in (["generation"], ["endgeneration"]):
                pieces.append(_quote_literal(_build_marker(f"{words[0]}:")))
        elif kind != "whitespace":
            tag.append((kind, value))
    return "".join(pieces)


def mark_message(message: Mapping[str, Any]) -> dict[str, Any]:
    marked, turn = dict(message), message[TURN_KEY]
    pieces = split_reasoning(message)
    for kind, start in (("text", 0), ("reasoning", 2)):
        pieces[start::4] = [_mark_text(kind, piece, turn) for piece in pieces[start::4]]
    marked["content"] = "".join(pieces)
    if isinstance(message.get("reasoning_content"), str):
        marked["reasoning_content"] = _mark_text("reasoning", message["reasoning_content"], turn)
    return marked


def split_reasoning(message: Mapping[str, Any]) -> list[str]:
    """Split the content of a message into text, `<think>`, reasoning, `</think>`, text and so on; any may be empty."""
    content: str = message["content"]
    return _INLINE_REASONING.split(content) if message["role"] == "assistant" and "think>" in content else [content]


def strip_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    pieces = split_reasoning(message)
    stripped = {key: value for key, value in message.items() if key != "reasoning_content"}
    return stripped | ({"content": "".join(pieces[::4]).lstrip()} if len(pieces) > 1 else {})


def find_reasoning_spans(marked: ChatSpans) -> list[tuple[int, int]]:
    """Return the spans of reasoning blocks, even empty ones, with tags such as `<think>` and `[/THINK]`."""
    thoughts = [match.span() for match in _EMPTY_THOUGHT.finditer(marked.text)]
    for start, end in (span for spans in marked.reasoning.values() for span in spans):
        before = _OPENED.search(marked.text[max(0, start - MAX_TAG_LENGTH) : start])
        after = _CLOSED.match(marked.text, end)
        thoughts.append((start - len(before[0]) if before else start, after.end() if after else end))
    return thoughts


def has_generation_blocks(source: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def parse_markers(rendered: str) -> ChatSpans:
    pieces: list[str] = []
    turns: Spans = {}
    generation: list[tuple[int, int]] = []
    texts: dict[str, Spans] = {"text": {}, "reasoning": {}}
    open_spans: dict[str, tuple[int, int]] = {}  # loop or text -> (turn, start)
    position = length = 0
    for marker in _MARKER.finditer(rendered):
        pieces.append(rendered[position : marker.start()])
        length += marker.start() - position
        position = marker.end()
        name, turn = marker.groups()
        if name == "generation":
            generation.append((length, length))
        elif name == "endgeneration":
            generation[-1] = (generation[-1][0], length)
        elif name in texts:
            open_spans[name] = (int(turn), length)
        elif name.startswith("end"):
            # A template that truncates a text may drop its first marker.
            start = open_spans.pop(name[3:], (int(turn), length))[1]
            texts[name[3:]].setdefault(int(turn), []).append((start, length))
        else:
            if name in open_spans:
                index, start = open_spans.pop(name)
                if length > start:
                    turns.setdefault(index, []).append((start, length))
            if turn:
                open_spans[name] = (int(turn), length)
    pieces.append(rendered[position:])
    return ChatSpans("".join(pieces), turns, generation, texts["text"], texts["reasoning"])


def _mark_text(kind: str, text: str, turn: int) -> str:
    """Put markers around a text; surrounding whitespace stays outside, where templates can trim it."""
    core = text.strip()
    if not core:
        return text
    before, _, after = text.partition(core)
    return f"{before}{_build_marker(f'{kind}:{turn}')}{core}{_build_marker(f'end{kind}:{turn}')}{after}"


def _build_marker(name: str) -> str:
    return f"{_OPEN}{name}{_CLOSE}"


def _quote_literal(text: str) -> str:
    """Return a Jinja expression that outputs a string; Jinja handles backslashes in strings as Python does."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "{{ '" + escaped + "' }}"


def _build_loop_marker(loop: int, variable: str) -> str:
    """Return the marker for an iteration over a numbered message; in other loops, it renders as nothing."""
    key = f"{variable}.{TURN_KEY}"
    marker = f"{{{{ '{_OPEN}{loop}:' ~ {key} ~ '{_CLOSE}' }}}}"
    seen = f"{{% set zerolora_{loop}.turns = true %}}"
    return f"{{% if {variable} is mapping and {key} is defined %}}{seen}{marker}{{% endif %}}"
