"""Preference data: a chosen (better) and a rejected (worse) answer to the same prompt, as two documents in one row."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from trainer.config import UserError
from trainer.config.errors import to_text
from trainer.data.formats import LABELS, RecordFormat
from trainer.data.records import (
    MASK_FIELDS,
    WEIGHT_FIELDS,
    Conversation,
    PlainText,
    SingleExample,
    TrackedFields,
    build_alpaca_prompt,
    join_prompt_and_completion,
    prepend_system_prompt,
)
from trainer.data.tokens import EncodedDocument

SIDES = ("chosen", "rejected")
LARGEST_MARGIN = 1e6
"""Limit on margins, which are stored as float32 (1e39 would become infinite)."""
# Token weights that encode the label of a labeled answer in batches; mismatched answers have weight 1.
DESIRABLE, UNDESIRABLE = 1.0, 0.5


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected answer, each with their common prompt; only the answers are trained on."""

    chosen: SingleExample
    rejected: SingleExample
    margin: float = 0.0
    """Amount by which a reward model should score the chosen answer higher; 0 if the record has none."""
    unused_fields: tuple[str, ...] = field(default=(), compare=False)
    """Unused nonempty fields of the record."""


def read_pair(record: Mapping[str, Any], fmt: RecordFormat, origin: str, system_prompt: str | None) -> Pair:
    """Read a record in the `preference` format.

    Answers are strings, lists of turns, or complete conversations that begin with the same turns. Raises UserError,
    prefixed with `origin`, for missing, empty or equal answers, different prompts, or an invalid margin.
    """
    fields = TrackedFields(record)
    answers = [_read_answer(fields, fmt.names[name], origin) for name in SIDES]
    if type(answers[0]) is not type(answers[1]):
        raise UserError(f"{origin}: one of chosen and rejected is a string and the other a list; use one type for both")
    margin = fields.get(name := fmt.names["margin"]) or 0.0
    with suppress(ValueError):  # a cell of a CSV file
        margin = float(margin) if isinstance(margin, str) else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= LARGEST_MARGIN:
        problem = f"must be a number of at most {LARGEST_MARGIN:,.0f}"
        raise UserError(f"{origin}: {name}={to_text(margin, 30)}: {problem}; fix it, or remove the field")
    prompt, is_chat = _read_prompt(fields, fmt, origin)
    if isinstance(prompt, list) and prompt and _get_role(prompt[-1]) in ("assistant", "gpt"):
        if not _is_conversation(answers[0]):
            problem = "the prompt ends with an answer, which chosen and rejected would follow"
            raise UserError(f"{origin}: {problem}; remove its last turn, or remove the record")
        prompt = None  # one of both conversations, as in UltraFeedback
    if prompt in (None, []) or _is_conversation(answers[0]):
        field_prompt, prompt = prompt, _find_common_prefix(answers, origin)
        _check_prompt(field_prompt, prompt, origin)
        answers = [answer[len(prompt) :] for answer in answers]
    if answers[0] == answers[1]:
        raise UserError(f"{origin}: chosen and rejected are identical; remove the record")
    sides: list[SingleExample] = []
    for name, answer in zip(SIDES, answers, strict=True):
        side_fmt = replace(fmt, names={**fmt.names, "completion": fmt.names[name]})
        sides.append(_join_answer(system_prompt, prompt, answer, fields, side_fmt, origin, chat=is_chat))
    if len({side.images for side in sides if isinstance(side, Conversation)}) > 1:
        raise UserError(f"{origin}: chosen and rejected have different images; keep only the prompt's images")
    unused = dict.fromkeys([*fields.list_unused(), *sides[0].unused_fields, *sides[1].unused_fields])
    return Pair(sides[0], sides[1], float(margin), tuple(unused))


@dataclass(frozen=True)
class LabeledAnswer:
    answer: SingleExample
    is_desirable: bool
    is_second_answer: bool = False
    """Whether this is the second answer of its record."""
    unused_fields: tuple[str, ...] = field(default=(), compare=False)


def read_unpaired(
    record: Mapping[str, Any], fmt: RecordFormat, origin: str, system_prompt: str | None
) -> list[LabeledAnswer]:
    """Read the labeled answer from a record in the `unpaired` format, or both answers from a pair.

    The answer is a completion, or the last turn of a conversation. Raises UserError, prefixed with `origin`, if the
    label, the prompt or the answer is missing.
    """
    fields, names = TrackedFields(record), fmt.names
    value = fields.get(names["label"])
    if value is None and record.get(names["chosen"]) is not None:
        pair = read_pair(record, fmt, origin, system_prompt)
        rejected = LabeledAnswer(pair.rejected, False, is_second_answer=True)
        return [LabeledAnswer(pair.chosen, True, unused_fields=pair.unused_fields), rejected]
    if (label := LABELS.get(str(value).strip().lower())) is None:
        problem = " is missing" if value is None else f"={to_text(value, 30)}: must be true or false, or 1 or 0"
        fix = "set it to true for a good answer, false for a bad one"
        raise UserError(f"{origin}: {names['label']}{problem}; {fix}")
    prompt, is_chat = _read_prompt(fields, fmt, origin)
    name = names["completion"] if names["completion"] in record else names["output"]
    if isinstance(prompt, list) and name not in record:
        turns, name = prompt, names["messages"]
        prompt, answer = turns[:-1], turns[-1:]
    else:
        answer = _read_answer(fields, name, origin)
    if not prompt:
        raise UserError(f"{origin}: the prompt is empty; add one, or remove the record")
    answer_fmt = replace(fmt, names={**names, "completion": name})
    example = _join_answer(system_prompt, prompt, answer, fields, answer_fmt, origin, chat=is_chat)
    unused = tuple(dict.fromkeys([*fields.list_unused(), *example.unused_fields]))
    return [LabeledAnswer(example, label, unused_fields=unused)]


def _join_answer(
    system: str | None, prompt: Any, answer: Any, fields: TrackedFields, fmt: RecordFormat, origin: str, *, chat: bool
) -> SingleExample:
    """Join a prompt and its answer into a conversation, or into plain text if both are strings.

    With `chat`, two strings also become a conversation. Raises UserError if the answer (the field `completion`)
    is empty, or does not end with an assistant turn.
    """
    name = fmt.names["completion"]
    turns, last = None, {"content": answer or ""}
    if answer and (chat or not (isinstance(prompt, str) and isinstance(answer, str))):
        turns = join_prompt_and_completion(prompt, answer, fields, fmt, origin)
        last = turns.messages[-1]
    if last.get("role", "assistant") != "assistant":
        raise UserError(f"{origin}: {name} ends with a {last['role']} turn; add an answer, or remove the record")
    if not last["content"].strip() and not last.get("tool_calls"):
        raise UserError(f"{origin}: {name} is empty; add an answer, or remove the record")
    _check_weights(answer, turns, name, origin)
    return turns or PlainText(prepend_system_prompt(prompt, fields, fmt, origin, system), answer)


def _check_weights(answer: Any, turns: Conversation | None, name: str, origin: str) -> None:
    """Raise UserError if an assistant turn of an answer has a weight below 1."""
    if turns is None or not isinstance(answer, list):
        return
    for number, (turn, message) in enumerate(zip(answer, turns.messages[-len(answer) :], strict=True), start=1):
        for key in (*WEIGHT_FIELDS, *MASK_FIELDS) if message["role"] == "assistant" else ():
            if turn.get(key) is not None and turn[key] != (key in WEIGHT_FIELDS):
                problem = "the answers of pairs and labeled answers are trained as a whole; remove the field"
                raise UserError(f"{origin}, {name} turn {number}: {key}={to_text(turn[key])}: {problem}")


def _read_answer(record: Mapping[str, Any], name: str, origin: str) -> Any:
    answer = record.get(name)
    if isinstance(answer, Mapping):
        return [answer]
    if isinstance(answer, list) and isinstance(next(iter(answer), None), str):
        raise UserError(f"{origin}: {name} is a list of strings; keep one of them")
    if not isinstance(answer, str | list):
        raise UserError(f"{origin}: {name} is missing, or not a string or turns; add an answer, or remove the record")
    return answer


def _read_prompt(record: Mapping[str, Any], fmt: RecordFormat, origin: str) -> tuple[Any, bool]:
    """Return the prompt (None if the answers contain it), and whether to apply the chat template even to a string."""
    if turns := next(filter(None, (record.get(fmt.names[name]) for name in ("messages", "conversations"))), None):
        return turns, True
    instruction = record.get(fmt.names.get("instruction", ""))
    if not isinstance(instruction, str):
        return record.get(fmt.names.get("prompt", "prompt")), False
    return build_alpaca_prompt(record, fmt, origin), fmt.alpaca_as_chat


def _is_conversation(answer: Any) -> bool:
    """Return whether an answer is a complete conversation, which begins with a question or a system prompt."""
    return isinstance(answer, list) and bool(answer) and _get_role(answer[0]) in ("system", "user", "human")


def _get_role(turn: Any) -> Any:
    return turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None


def _find_common_prefix(answers: Sequence[Any], origin: str) -> Any:
    chosen, rejected = answers
    equal = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and isinstance(rejected, str):
        return chosen[: max(0, chosen.rfind(" ", 0, equal), chosen.rfind("\n", 0, equal))]
    if not equal:
        raise UserError(f"{origin}: chosen and rejected begin with different turns; begin both with the same prompt")
    return chosen[:equal]


def _check_prompt(field_prompt: Any, common_prompt: Any, origin: str) -> None:
    """Raise UserError if the answers' common prompt differs from the prompt field, or if there is neither."""
    if not common_prompt and field_prompt in (None, []):
        raise UserError(f"{origin}: chosen and rejected have no common prompt; begin both with the same prompt")
    common_texts, field_texts = (
        {str(turn.get("content", turn.get("value", ""))).strip() for turn in turns if isinstance(turn, Mapping)}
        for turns in (
            common_prompt,
            [{"content": field_prompt}] if isinstance(field_prompt, str) else field_prompt or (),
        )
    )
    if isinstance(common_prompt, list) and not field_texts <= common_texts:
        raise UserError(f"{origin}: prompt differs from the prompt in chosen and rejected; remove prompt, or fix both")


def join_pair(
    chosen: EncodedDocument, rejected: EncodedDocument, max_length: int, bos_token_id: int | None
) -> EncodedDocument:
    """Join both documents of a pair into one row of at most `max_length` tokens, if possible.

    Excess tokens are cut from the beginning of the prompt, equally in both documents, except for the beginning-of-text
    token `bos_token_id`. Answers, and prompts with images, are never cut.
    """
    excess = len(chosen.input_ids) + len(rejected.input_ids) - max_length
    warnings, is_cut = tuple(dict.fromkeys([*chosen.warnings, *rejected.warnings])), False
    if excess > 0 and not chosen.images:
        shortened = [_cut_prompt(document, -(-excess // 2), bos_token_id) for document in (chosen, rejected)]
        if is_cut := None not in shortened:
            chosen, rejected = filter(None, shortened)
    return EncodedDocument(
        [*chosen.input_ids, *rejected.input_ids],
        [*chosen.loss_weights, *rejected.loss_weights],
        warnings,
        rejected_tokens=len(rejected.input_ids),
        is_truncated=is_cut,
        images=chosen.images,
    )


def _cut_prompt(document: EncodedDocument, count: int, bos_token_id: int | None) -> EncodedDocument | None:
    """Drop `count` prompt tokens after a leading `bos_token_id`. Return None if no prompt would remain."""
    ids, weights = document.input_ids, document.loss_weights
    start = 1 if bos_token_id is not None and ids[:1] == [bos_token_id] else 0
    if next((at for at, weight in enumerate(weights) if weight), 0) <= start + count:
        return None
    return EncodedDocument([*ids[:start], *ids[start + count :]], [*weights[:start], *weights[start + count :]])


def join_labeled_answers(
    answers: Sequence[EncodedDocument], labels: Sequence[bool], max_length: int, bos_token_id: int | None
) -> list[EncodedDocument]:
    """Return rows of two documents: a prompt with its answer, and the same prompt with the previous row's answer.

    The first row uses the last row's answer. As in `join_pair`, prompts are cut in rows longer than `max_length`.
    """
    all_weights = [answer.loss_weights for answer in answers]
    starts = [next((at for at, weight in enumerate(weights) if weight), len(weights)) for weights in all_weights]
    rows = []
    for at, (answer, start, is_desirable) in enumerate(zip(answers, starts, labels, strict=True)):
        other, other_start = answers[at - 1], starts[at - 1]
        weight = DESIRABLE if is_desirable else UNDESIRABLE
        labeled = replace(answer, loss_weights=[weight if each else 0.0 for each in answer.loss_weights])
        mismatched = EncodedDocument(
            [*answer.input_ids[:start], *other.input_ids[other_start:]],
            [0.0] * start + [float(each > 0) for each in other.loss_weights[other_start:]],
        )
        rows.append(join_pair(labeled, mismatched, max_length, bos_token_id))
    return rows
