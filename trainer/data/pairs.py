"""Preference data: a better (chosen) and a worse (rejected) answer to the same prompt, as two documents of one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from trainer.config import UserError
from trainer.config.errors import shown
from trainer.data.formats import Shape, describe_type
from trainer.data.records import (
    Fields,
    Text,
    Turns,
    after_system,
    alpaca_prompt,
    read_conversational_pair,
    read_system,
)
from trainer.data.tokens import Encoded

SIDES = ("chosen", "rejected")
LARGEST_MARGIN = 1e6
"""Margins are stored as float32, in which 1e39 and more would be infinite."""
# Weights of the tokens of a labelled answer, by which batches carry the label; those of mismatched answers are 1.
DESIRABLE, UNDESIRABLE = 1.0, 0.5


@dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt, each with the prompt; only the answers are trained."""

    chosen: Turns | Text
    rejected: Turns | Text
    margin: float = 0.0
    """Amount by which a reward model should score the chosen answer higher; 0 without a margin."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Nonempty fields of the record that were not used."""


def read_pair(record: Mapping[str, Any], shape: Shape, where: str, system_prompt: str | None) -> Pair:
    """Return a record of the format `preference`.

    Answers are texts, turns, or whole conversations that begin with the same turns. Raises UserError, starting with
    `where`, for answers that are missing, empty or equal, for prompts that differ, and for a margin that is no number.
    """
    fields = Fields(record)
    answers = [_answer(fields, shape.names[name], where) for name in SIDES]
    margin = fields.get(name := shape.names["margin"]) or 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= LARGEST_MARGIN:
        problem = f"is not a number of at most {LARGEST_MARGIN:,.0f}"
        raise UserError(f"{where}: {name}={shown(margin, 30)} {problem}; give one, or remove the field")
    prompt, is_chat = _prompt(fields, shape, where)
    if prompt in (None, []) or _begins_conversation(answers[0]):
        given, prompt = prompt, _common_start(answers, where)
        _check_prompt(given, prompt, where)
        answers = [answer[len(prompt) :] for answer in answers]
    if answers[0] == answers[1]:
        raise UserError(f"{where}: chosen and rejected are equal, so neither can be preferred; remove the record")
    sides: list[Turns | Text] = []
    for name, answer in zip(SIDES, answers, strict=True):
        one = replace(shape, names={**shape.names, "completion": shape.names[name]})
        sides.append(_join_answer(system_prompt, prompt, answer, fields, one, where, chat=is_chat))
    unread = dict.fromkeys([*fields.unread(), *sides[0].unread, *sides[1].unread])
    return Pair(sides[0], sides[1], float(margin), tuple(unread))


@dataclass(frozen=True)
class Labelled:
    """An answer with its prompt, and whether it is desirable."""

    answer: Turns | Text
    is_desirable: bool
    continued: bool = False
    """Whether it is the second answer of its record."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Nonempty fields of the record that were not used."""


def read_unpaired(record: Mapping[str, Any], shape: Shape, where: str, system_prompt: str | None) -> list[Labelled]:
    """Return the labelled answer of a record of the format `unpaired`, or the two of a pair.

    The answer is a completion, or the last turn of a conversation. Raises UserError, starting with `where`, for a
    record without a label, a prompt or an answer.
    """
    fields, names = Fields(record), shape.names
    label = fields.get(names["label"])
    if label is None and record.get(names["chosen"]) is not None:
        pair = read_pair(record, shape, where, system_prompt)
        return [Labelled(pair.chosen, True, unread=pair.unread), Labelled(pair.rejected, False, continued=True)]
    if not isinstance(label, bool):
        found = "missing" if label is None else f"{describe_type(label)}, not true or false"
        raise UserError(f"{where}: {names['label']} is {found}; set it to true for a good answer, false for a bad one")
    prompt, is_chat = _prompt(fields, shape, where)
    name = names["completion"] if names["completion"] in record else names["output"]
    if isinstance(prompt, list) and name not in record:
        turns, name = prompt, names["messages"]
        prompt, answer = turns[:-1], turns[-1:]
    else:
        answer = _answer(fields, name, where)
    if not prompt:
        raise UserError(f"{where}: the prompt is empty; give what the answer answers, or remove the record")
    one = replace(shape, names={**names, "completion": name})
    example = _join_answer(system_prompt, prompt, answer, fields, one, where, chat=is_chat)
    return [Labelled(example, label, unread=tuple(dict.fromkeys([*fields.unread(), *example.unread])))]


def _join_answer(
    system_prompt: str | None, prompt: Any, answer: Any, fields: Fields, shape: Shape, where: str, *, chat: bool
) -> Turns | Text:
    """Return a prompt with its answer, the field `completion`. Raises UserError if it is empty or not an answer."""
    name = shape.names["completion"]
    turns, last = None, {"content": answer or ""}
    if answer and (chat or not (isinstance(prompt, str) and isinstance(answer, str))):
        turns = read_conversational_pair(prompt, answer, fields, shape, where)
        last = turns.messages[-1]
    if last.get("role", "assistant") != "assistant":
        raise UserError(
            f"{where}: {name} ends with a turn of {last['role']}, not with an answer; add one, or remove it"
        )
    if not last["content"].strip() and not last.get("tool_calls"):
        raise UserError(f"{where}: {name} is empty; give an answer, or remove the record")
    return turns or Text(after_system(read_system(fields, shape, where) or system_prompt, prompt), answer)


def _answer(record: Mapping[str, Any], name: str, where: str) -> Any:
    answer = record.get(name)
    if isinstance(answer, Mapping):
        return [answer]
    if isinstance(answer, list) and isinstance(next(iter(answer), None), str):
        raise UserError(f"{where}: {name} is a list of texts; keep one of them")
    if not isinstance(answer, str | list):
        raise UserError(f"{where}: {name} is missing, or neither text nor turns; give an answer, or remove the record")
    return answer


def _prompt(record: Mapping[str, Any], shape: Shape, where: str) -> tuple[Any, bool]:
    """Return the prompt, None if the answers contain it, and whether it is a user turn for the chat template."""
    if turns := next(filter(None, (record.get(shape.names[name]) for name in ("messages", "conversations"))), None):
        return turns, True
    instruction = record.get(shape.names.get("instruction", ""))
    if not isinstance(instruction, str):
        return record.get(shape.names.get("prompt", "prompt")), False
    return alpaca_prompt(record, shape, where), shape.alpaca_as_chat


def _begins_conversation(answer: Any) -> bool:
    """Return whether an answer is a whole conversation, which begins with a question or a system prompt."""
    first = answer[0] if isinstance(answer, list) and answer and isinstance(answer[0], Mapping) else {}
    return first.get("role", first.get("from")) in ("system", "user", "human")


def _common_start(answers: Sequence[Any], where: str) -> Any:
    """Return the equal turns, or the equal words, with which both answers begin."""
    chosen, rejected = answers
    equal = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and isinstance(rejected, str):
        return chosen[: max(0, chosen.rfind(" ", 0, equal), chosen.rfind("\n", 0, equal))]
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise UserError(f"{where}: one of chosen and rejected is text and the other has turns; use one form for both")
    if not equal:
        raise UserError(f"{where}: chosen and rejected begin with different turns, and must answer the same prompt")
    return chosen[:equal]


def _check_prompt(given: Any, found: Any, where: str) -> None:
    """Raise UserError if the prompt differs from that of the answers' conversations, or texts have no prompt."""
    if not found and given in (None, []):
        raise UserError(f"{where}: chosen and rejected have no common prompt; begin both with the same prompt")
    texts, asked = (
        [str(turn.get("content", turn.get("value", ""))).strip() for turn in turns if isinstance(turn, Mapping)]
        for turns in (found, [{"content": given}] if isinstance(given, str) else given or ())
    )
    if isinstance(found, list) and not {*asked} <= {*texts}:
        raise UserError(f"{where}: prompt differs from that of chosen and rejected; remove it, or correct them")


def join_pair(chosen: Encoded, rejected: Encoded, max_length: int, first: int | None) -> Encoded:
    """Return both documents of a pair as one row of at most `max_length` tokens, if that is possible.

    What is too much is cut from the beginning of the prompt, equally from both documents, which keep the token `first`
    that begins texts; answers and prompts with images are never cut.
    """
    excess = len(chosen.input_ids) + len(rejected.input_ids) - max_length
    cuts = excess > 0 and not chosen.images
    parts = [_cut(document, -(-excess // 2), first) for document in (chosen, rejected)] if cuts else []
    fits = bool(parts) and all(part is not None for part in parts)
    one, other = [part for part in parts if part is not None] if fits else (chosen, rejected)
    return Encoded(
        [*one.input_ids, *other.input_ids],
        [*one.trained, *other.trained],
        tuple(dict.fromkeys([*chosen.lost, *rejected.lost])),
        rejected=len(other.input_ids),
        cut=fits,
        images=chosen.images,
    )


def _cut(document: Encoded, count: int, first: int | None) -> Encoded | None:
    """Return the document without `count` tokens of its prompt, or None if no prompt would be left."""
    ids, trained = document.input_ids, document.trained
    kept = 1 if first is not None and ids[:1] == [first] else 0
    if next((at for at, weight in enumerate(trained) if weight), 0) <= kept + count:
        return None
    return Encoded([*ids[:kept], *ids[kept + count :]], [*trained[:kept], *trained[kept + count :]])


def join_labelled(
    answers: Sequence[Encoded], labels: Sequence[bool], max_length: int, first: int | None
) -> list[Encoded]:
    """Return each answer and, as the second document of its row, its prompt with the answer of the row before.

    The first row has the last one's. As in `join_pair`, prompts are cut if a row is longer than `max_length`.
    """
    starts = [next((at for at, weight in enumerate(one.trained) if weight), len(one.trained)) for one in answers]
    rows = []
    for at, (own, start, is_desirable) in enumerate(zip(answers, starts, labels, strict=True)):
        other, begin = answers[at - 1], starts[at - 1]
        weight = DESIRABLE if is_desirable else UNDESIRABLE
        mine = replace(own, trained=[weight if trained else 0.0 for trained in own.trained])
        mismatched = Encoded(
            [*own.input_ids[:start], *other.input_ids[begin:]],
            [0.0] * start + [float(trained > 0) for trained in other.trained[begin:]],
        )
        rows.append(join_pair(mine, mismatched, max_length, first))
    return rows
