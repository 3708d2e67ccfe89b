"""Which characters of a rendered chat belong to which turn, for any chat template.

A chat template is a program: it may put a system prompt before the first turn, trim texts, or drop the thinking of
all but the last answer, so a conversation rendered up to turn i is in general no prefix of the whole one, and a
turn's text need not occur in it. What all templates have in common is a loop over the messages. `mark_template`
writes a marker into the first position of each loop body and after each loop; rendered, the markers say where every
turn begins and ends, in one pass. `read_marks` takes them out again, and whoever calls it compares the rest with what
the unmarked template renders. `{% generation %}` blocks, where an author has set them, are marked in the same way, and
so is the text of a turn (`mark_text`), to tell it from the tags that a template writes around it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment

# Message field that carries the turn's number into the marked template.
TURN_KEY = "zerolora_turn"
# Noncharacters: Unicode guarantees that no text holds them (https://www.unicode.org/faq/private_use.html#noncharacters).
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_OPEN}(\\d+|generation|endgeneration|text|endtext):(\\d*){_CLOSE}")


@dataclass(frozen=True)
class Marked:
    """A rendered chat without its markers; spans are [start, end) in characters.

    `turns[i]` are the stretches written while a loop was at message i, in order; `texts[i]` those of its marked text;
    `generation` the blocks an author set.
    """

    text: str
    turns: dict[int, list[tuple[int, int]]]
    generation: list[tuple[int, int]]
    texts: dict[int, list[tuple[int, int]]]


@lru_cache(maxsize=16)
def mark_template(source: str) -> str:
    """The template with a marker at the start of every loop body and generation block, and after each of their ends.

    Raises jinja2.TemplateSyntaxError if the template cannot be read.
    """
    # The options with which transformers compiles chat templates: they decide which white space a tag swallows, and the
    # lexer hands a tag over with that white space, so that a marker right behind it changes nothing.
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"]
    )
    pieces: list[str] = []
    tag: list[tuple[str, str]] = []
    open_loops: list[int | None] = []
    loops = 0
    for _, kind, value in environment.lex(source):
        pieces.append(value)
        if kind == "block_begin":
            tag = []
        elif kind == "block_end":
            words = [word for word_kind, word in tag if word_kind in ("name", "operator")]
            if words[:1] == ["for"]:
                # `for key, value in ...` does not run over messages; everything else is decided while rendering.
                open_loops.append(loops if words[2:3] == ["in"] else None)
                pieces.append(_loop_marker(loops, words[1]) if open_loops[-1] is not None else "")
                loops += 1
            elif words[:1] == ["endfor"] and open_loops:
                loop = open_loops.pop()
                pieces.append(_literal(f"{loop}:") if loop is not None else "")
            elif words[:1] in (["generation"], ["endgeneration"]):
                pieces.append(_literal(f"{words[0]}:"))
        elif kind != "whitespace":
            tag.append((kind, value))
    return "".join(pieces)


def mark_text(text: str, turn: int) -> str:
    """A turn's text between markers; white space around it stays outside, where templates trim it."""
    core = text.strip()
    if not core:
        return text
    before, _, after = text.partition(core)
    return f"{before}{_OPEN}text:{turn}{_CLOSE}{core}{_OPEN}endtext:{turn}{_CLOSE}{after}"


def has_generation_blocks(source: str) -> bool:
    """Whether the template's author has said with `{% generation %}` what the model writes."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def read_marks(rendered: str) -> Marked:
    """Take the markers out of a chat rendered by a marked template."""
    pieces: list[str] = []
    turns: dict[int, list[tuple[int, int]]] = {}
    generation: list[tuple[int, int]] = []
    texts: dict[int, list[tuple[int, int]]] = {}
    running: dict[str, tuple[int, int]] = {}  # loop -> (turn, start) of the iteration that is being written
    position = length = 0
    for mark in _MARK.finditer(rendered):
        pieces.append(rendered[position : mark.start()])
        length += mark.start() - position
        position = mark.end()
        loop, turn = mark.groups()
        if loop == "generation":
            generation.append((length, length))
        elif loop == "endgeneration":
            generation[-1] = (generation[-1][0], length)
        elif loop == "text":
            texts.setdefault(int(turn), []).append((length, length))
        elif loop == "endtext":
            texts[int(turn)][-1] = (texts[int(turn)][-1][0], length)
        else:
            if loop in running:
                index, start = running.pop(loop)
                if length > start:
                    turns.setdefault(index, []).append((start, length))
            if turn:
                running[loop] = (int(turn), length)
    pieces.append(rendered[position:])
    return Marked("".join(pieces), turns, generation, texts)


def _literal(mark: str) -> str:
    return "{{ '" + _OPEN + mark + _CLOSE + "' }}"


def _loop_marker(loop: int, variable: str) -> str:
    key = f"{variable}.{TURN_KEY}"
    mark = f"'{_OPEN}{loop}:' ~ {key} ~ '{_CLOSE}'"
    return "{{ " + f"{mark} if {variable} is mapping and {key} is defined else ''" + " }}"
