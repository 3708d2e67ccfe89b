"""Encode conversations as token ids and loss weights, using a chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.config import DatasetSection, UserError
from trainer.config.errors import to_text
from trainer.data.chat_template import ChatTemplate, Message, RenderError
from trainer.data.image_parts import IMAGE_MARKER
from trainer.data.markers import TURN_KEY, Spans, find_reasoning_spans, split_reasoning
from trainer.data.records import Conversation
from trainer.data.source_files import read_template
from trainer.data.tokens import NO_END_TOKEN, EncodedDocument, Span, WeightedSpan, encode_spans
from trainer.data.vision import FIRST_FRAME, ImageReader, apply_edits

CHAT_TEMPLATE_FIX = (
    "set dataset.chat_template to a template with {% generation %} blocks around answers, or dataset.train_on: all"
)
# How warnings describe the parts of a record that a template drops.
DROPPED_REASONING = "reasoning that the chat template drops; see dataset.chat_template_kwargs"
DROPPED_TEXT = "text around reasoning that the chat template drops; see dataset.thinking"
DROPPED_SYSTEM = "a system turn that the chat template drops; see dataset.chat_template"
RECORD_WARNINGS = (DROPPED_REASONING, DROPPED_TEXT, DROPPED_SYSTEM, NO_END_TOKEN, FIRST_FRAME)


def load_chat_template(
    tokenizer: PreTrainedTokenizerBase, configured: str | None, *, for_tools: bool = False
) -> str | None:
    """Return the Jinja template to use: the configured text or file, else the tokenizer's, else None.

    If the tokenizer has several templates, conversations with tools use `tool_use`, as in transformers, and others use
    `default`. Raises UserError if `configured` is empty, or if it names a file that is missing or cannot be read.
    """
    if configured is None:
        template = tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if for_tools and "tool_use" in template else "default")
        return template
    return read_template(configured)


def build_template_variables(section: DatasetSection) -> dict[str, Any]:
    return section.chat_template_kwargs | ({"enable_thinking": False} if section.thinking == "empty" else {})


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    section: DatasetSection,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Message] | None = None,
) -> str:
    """Return the text of a conversation up to the assistant's answer, rendered as in training.

    `messages` have a role and text content. The text contains the template's special tokens; tokenize it without adding
    more. Raises UserError if there is no chat template, or if the template rejects the conversation.
    """
    source = load_chat_template(tokenizer, section.chat_template, for_tools=bool(tools))
    if source is None:
        raise UserError("dataset.chat_template: not set, and the tokenizer has no chat template; set one")
    if tools and "tools" not in source:
        raise UserError("the conversation has tools, which the chat template does not support; remove the tools")
    chat = prepend_system_message([dict(message) for message in messages], section.system_prompt)
    try:
        template = ChatTemplate(tokenizer, source, build_template_variables(section), section.chat_template)
        return template.render(chat, tools, add_generation_prompt=True)
    except RenderError as error:
        raise UserError(f"the chat template rejects the conversation ({error}); change its turns") from None


def prepend_system_message(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Prepend the system prompt to the messages, unless they begin with a system message."""
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


class ChatEncoder:
    """Encodes conversations with chat templates.

    The loss on an assistant turn starts at the end of the generation prompt, where the model starts at inference, and
    includes the end-of-turn token. For other roles in `train_on`, it covers the text and the end-of-turn token, but not
    the tags around the text. With `mask_reasoning`, it excludes reasoning. Raises UserError if a template does not
    compile.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        train_on: Sequence[str],
        system_prompt: str | None,
        variables: Mapping[str, Any] | None = None,
        tool_template: str | None = None,
        *,
        mask_reasoning: bool = False,
        image_reader: ImageReader | None = None,
        setting: str | None = None,
    ) -> None:
        self.tokenizer, self._mask_thoughts, self._images = tokenizer, mask_reasoning, image_reader
        self.train_on = frozenset(train_on)
        self.system_prompt = system_prompt
        sources = (template, tool_template or template)
        self.template = template if len(set(sources)) == 1 else sources
        _check_variables(variables or {}, sources)
        templates = {each: ChatTemplate(tokenizer, each, variables or {}, setting) for each in dict.fromkeys(sources)}
        self._templates = tuple(templates[source] for source in sources)

    def encode(self, conversations: Sequence[Conversation], origins: Sequence[str]) -> list[EncodedDocument]:
        """Return a document for each conversation. Raises UserError, prefixed with `origins`, for a bad record."""
        chats = [self._render(*record) for record in zip(conversations, origins, strict=True)]
        documents = encode_spans(self.tokenizer, [chat.text for chat in chats], [chat.spans for chat in chats], origins)
        return [
            replace(document, warnings=tuple(chat.warnings), images=conversation.images)
            for document, chat, conversation in zip(documents, chats, conversations, strict=True)
        ]

    def _render(self, conversation: Conversation, origin: str) -> "_RenderedChat":
        template = self._templates[bool(conversation.tools)]
        _check_tools(conversation, template, origin)
        messages = [{**message, TURN_KEY: index} for index, message in enumerate(conversation.messages)]
        if messages:
            # An inserted system turn is numbered after the last turn.
            messages = [
                {TURN_KEY: len(messages), **each} for each in prepend_system_message(messages, self.system_prompt)
            ]
        try:
            rendered = _RenderedChat(template, messages, conversation.tools, origin)
            rendered.check_texts()
            rendered.find_spans(self.train_on, conversation.weights)
            if self._mask_thoughts:
                rendered.mask_reasoning()
            rendered.check_end()
            if self._images is not None:
                rendered.insert_images(self._images, conversation.images)
        except RenderError as error:
            fix = "remove dataset.system_prompt, or fix" if messages[0][TURN_KEY] else "fix or remove"
            raise UserError(f"{origin}: the chat template rejects it ({error}); {fix} the record") from None
        return rendered


class _RenderedChat:
    """Renders a conversation, locates its trained `spans`, and collects the `warnings` about the record."""

    def __init__(self, template: ChatTemplate, chat: list[Message], tools: list[Message] | None, origin: str) -> None:
        self.spans: list[WeightedSpan] = []
        self.warnings: dict[str, None] = {}
        self.text = template.render(chat, tools)
        self._template, self._chat, self._tools, self._origin = template, chat, tools, origin
        self._roles = {message[TURN_KEY]: message["role"] for message in chat}
        self._marked = template.render_marked(chat, tools)
        self._texts_are_marked = self._marked.text == self.text
        if not self._texts_are_marked:  # the template inspects the texts
            self._marked = template.render_marked(chat, tools, mark_texts=False)

    def check_texts(self) -> None:
        """Warn if the template drops reasoning or system turns. Raise UserError if it drops anything else."""
        for message in self._chat:
            role, turn = message["role"], message[TURN_KEY]
            pieces = split_reasoning(message)
            thoughts = [*pieces[2::4], str(message.get("reasoning_content") or "")]
            if not self._are_rendered(thoughts, turn, self._marked.reasoning):
                self.warnings[DROPPED_REASONING] = None
            calls = [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
            texts_are_rendered = self._are_rendered(pieces[::4], turn, self._marked.texts)
            if not texts_are_rendered and turn in self._marked.texts:  # a part of them is
                self.warnings[DROPPED_TEXT] = None
                texts_are_rendered = True
            if texts_are_rendered and all(name in self.text for name in calls):
                if len(calls) > 1 and not self._template.writes_parallel_calls:
                    problem = f"renders one tool call per turn, but turn {turn + 1} has {len(calls)}"
                    raise UserError(f"{self._origin}: the chat template {problem}; write each as a separate turn")
            elif role == "system":
                self.warnings[DROPPED_SYSTEM] = None
            else:
                raise UserError(f"{self._origin}: the chat template omits {role} turn {turn + 1}; {CHAT_TEMPLATE_FIX}")

    def _are_rendered(self, texts: Sequence[str], turn: int, marked: Spans) -> bool:
        cores = [text.strip() for text in texts if text.strip()]
        if self._texts_are_marked:
            return len(cores) <= len(marked.get(turn, ()))
        pieces = [piece.strip() for core in cores for piece in core.split(IMAGE_MARKER)]
        return all(piece in self.text or json.dumps(piece, ensure_ascii=False)[1:-1] in self.text for piece in pieces)

    def find_spans(self, train_on: frozenset[str], weights: Mapping[int, float]) -> None:
        """Find the spans to train on. Raises UserError if they cannot be located in the rendered text."""
        if "all" in train_on:
            self.spans = [(0, len(self.text), 1.0)]
            return
        if self._marked.text != self.text or (train_on - {"assistant"} and not self._texts_are_marked):
            raise UserError(
                f"{self._origin}: cannot locate the turns in the output of this chat template; {CHAT_TEMPLATE_FIX}"
            )
        for index, message in enumerate(self._chat):
            role, turn = message["role"], message[TURN_KEY]
            weight = weights.get(turn, 1.0)
            if role not in train_on or not weight:
                continue
            blocks, trained = self._find_blocks(turn), list[Span]()
            if role != "assistant":
                ends = [self._find_end_token(start, end) for start, end in blocks]
                trained = _merge_spans([*self._marked.texts.get(turn, []), *ends[-1:]], self.text)
            elif blocks:
                trained = self._find_answer(index, blocks)
            elif message["content"].strip() or message.get("tool_calls"):
                raise UserError(f"{self._origin}: the chat template omits {role} turn {turn + 1}; {CHAT_TEMPLATE_FIX}")
            self.spans += [(start, end, weight) for start, end in trained if start < end]
        self.spans.sort()

    def mask_reasoning(self) -> None:
        """Exclude reasoning from training. Raises UserError if it cannot be located in the rendered text."""
        has_thoughts = any("think>" in str(turn) or "reasoning_content" in turn for turn in self._chat)
        if has_thoughts and not self._texts_are_marked:
            problem = "dataset.thinking: mask cannot locate the reasoning in this chat template"
            raise UserError(f"{self._origin}: {problem}; {CHAT_TEMPLATE_FIX}")
        for first, last in find_reasoning_spans(self._marked):
            parts = [((a, min(b, first), weight), (max(a, last), b, weight)) for a, b, weight in self.spans]
            self.spans = [span for pair in parts for span in pair if span[0] < span[1]]

    def check_end(self) -> None:
        """Warn if no end-of-turn token follows the last answer, because the model would not learn to stop."""
        if self.spans and not self._template.find_token_at_end(self.text, *self.spans[-1][:2]):
            self.warnings[NO_END_TOKEN] = None

    def insert_images(self, reader: ImageReader, images: Sequence[bytes]) -> None:
        """Replace image placeholders with the images' tokens, which are excluded from the loss."""
        edits, is_animated = reader.build_edits(self.text, images, self._origin)
        self.text, self.spans = apply_edits(self.text, self.spans, edits)
        if is_animated:
            self.warnings[FIRST_FRAME] = None

    def _find_blocks(self, turn: int) -> list[Span]:
        """Return a turn's spans, except inside turns of other roles, where templates may repeat a tool call."""
        role, spans = self._roles[turn], self._marked.turns.get(turn, [])
        if len(spans) < 2:
            return spans
        outer = [span for other, spans in self._marked.turns.items() if self._roles[other] != role for span in spans]
        return [(start, end) for start, end in spans if not any(a <= start and end <= b for a, b in outer)]

    def _find_answer(self, index: int, blocks: list[Span]) -> list[Span]:
        template, text, turn = self._template, self.text, self._chat[index][TURN_KEY]
        if template.has_generation_blocks:
            # A block may contain the header, which is never trained.
            answer_start = self._find_answer_start(index, *blocks[0])
            spans = [
                (max(begin, answer_start), stop)
                for start, end in blocks
                for begin, stop in self._marked.generation
                if start <= begin < stop <= end and answer_start < stop
            ]
            if spans and not template.find_token_at_end(text, *spans[-1]):  # the template's block ends before the token
                spans[-1] = (spans[-1][0], template.find_token_after(text[: blocks[-1][1]], spans[-1][1])[1])
            return spans
        start, end = blocks[0]
        begin, texts = self._find_answer_start(index, start, end), self._marked.texts
        if any(start <= span[0] and span[1] <= end for other in texts if other != turn for span in texts[other]):
            # The turn contains the results of its calls; rendering without them shows where they begin.
            alone = template.render_marked(self._chat[: index + 1], self._tools)
            stop = start + template.measure_common_prefix(alone.text[alone.turns[turn][0][0] :], text[start:end])
            return [(begin, max(begin, stop)), *(span for span in texts.get(turn, []) if span[0] >= max(begin, stop))]
        spans = [(begin, end), *blocks[1:]]
        spans[-1] = (spans[-1][0], self._close_answer(index, *spans[-1]))
        return spans

    def _find_answer_start(self, index: int, start: int, end: int) -> int:
        turn = self._chat[index][TURN_KEY]
        begins = [span[0] for spans in (self._marked.texts, self._marked.reasoning) for span in spans.get(turn, [])]
        first = min((begin for begin in begins if start <= begin <= end), default=None)
        lead = None if first is None else self.text[start:first]
        observed = self._template.render_generation_prompt(self._chat[:index], self._tools, lead)
        # The prompt may follow a default system prompt in the turn, or be at the end of the question's turn.
        prompt, last = (observed or self._template.default_prompt).lstrip(), end if first is None else first
        at = self.text.find(prompt, max(0, start - len(prompt)), last)
        if at >= 0:
            return max(start, at + len(prompt))
        # A prompt may contain the start of an answer, such as <think>, that this turn lacks.
        common = self._template.measure_common_header(prompt, self.text[start:last])
        # Some templates add a generation prompt after questions, but not after tool results in the model's turn.
        has_no_prompt = observed == "" and self._template.question_generation_prompt
        return start + common if common or has_no_prompt or first is None else first

    def _close_answer(self, index: int, start: int, end: int) -> int:
        """Return the offset just past an answer's end-of-turn token; append the token to the text if it is missing."""
        token, stop = self._template.find_end_of_answer(self.text, start, end)
        closing = self._template.answer_end_tokens["tool_calls" in self._chat[index]]
        if token in self._template.special or not closing or self.text[stop:].strip() or closing.strip() == token:
            return stop
        self.text = self.text[:stop] + closing
        return len(self.text)

    def _find_end_token(self, start: int, end: int) -> Span:
        """Return the span of a block's end-of-turn token; empty for closing tags such as [/INST] and </result>."""
        stop = start + len(self.text[start:end].rstrip())
        token = self._template.find_token_at_end(self.text, start, end)
        closes = token.startswith(("</", "[/")) and token != self._template.eos_token
        return (stop if closes else stop - len(token), stop)


def _check_variables(variables: Mapping[str, Any], sources: Sequence[str]) -> None:
    """Raise UserError for variables that no template uses, or that the trainer sets."""
    reserved = {"messages", *signature(render_jinja_template).parameters} - {"documents", "kwargs"}
    for name, value in variables.items():
        setting = f"dataset.chat_template_kwargs.{name}={to_text(value)}"
        if name in reserved:
            raise UserError(f"{setting}: is set by the trainer; remove it")
        if not re.search(rf"\b{re.escape(name)}\b", "".join(sources)):
            raise UserError(f"{setting}: the chat template does not use it; remove it")


def _check_tools(conversation: Conversation, template: ChatTemplate, origin: str) -> None:
    calls = any("tool_calls" in message for message in conversation.messages)
    for name, used in (("tool_calls", calls), ("tools", conversation.tools)):
        if used and name not in template.source:
            raise UserError(
                f"{origin}: has {name.replace('_', ' ')}, which this tokenizer's chat template does not support; "
                "set dataset.chat_template to a template that supports them, or remove them"
            )


def _merge_spans(spans: list[Span], text: str) -> list[Span]:
    """Merge spans that are separated only by whitespace."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and not text[merged[-1][1] : start].strip():
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
