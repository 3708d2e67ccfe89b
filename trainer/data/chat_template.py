"""A chat template, the form of messages it expects and what it writes around answers, found by test renderings."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.config import UserError
from trainer.config.errors import shown
from trainer.config.yaml_core import read_yaml
from trainer.data.image_parts import IMAGE
from trainer.data.marks import TURN_KEY, Marked, has_generation_blocks, mark_message, mark_template, read_marks

Message = dict[str, Any]
_PROBES: dict[str, Message] = read_yaml(Path(__file__).with_name("probes.yaml")).tree
LONGEST_S = 3
_QUESTION, _ANSWER, _CALL, _RESULT, _TOOL = _PROBES.values()


class RenderError(Exception):
    """A failure of a chat template."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """End a block that takes LONGEST_S of processor time, such as nested loops in a template, with RenderError."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise RenderError(f"it takes more than {LONGEST_S} seconds")

    if current_thread() is not main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class ChatTemplate:
    """Renderer of conversations with one template; finds the tokens that begin and end answers.

    Raises UserError if the template does not compile, or cannot render a question and its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self.source, self._variables = tokenizer, source, dict(variables)
        self._prompts: dict[tuple[str, bool, str | None], str | None] = {}
        self._part_roles: frozenset[str] = frozenset()
        self._call_content: str | None = ""
        self._call_arguments: type = dict
        self.eos_token, self.has_generation_blocks = tokenizer.eos_token, has_generation_blocks(source)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        self.special = frozenset(name for name, special in added.items() if special or name == self.eos_token)
        self._added = frozenset(added) - {""}
        # Some tokenizers have thousands of them.
        self._added_lengths = sorted({len(token) for token in self._added}, reverse=True)
        try:
            self._marked_source = mark_template(source)
            self._find_part_roles()
            self._find_call_form()
        except (TemplateError, RenderError) as error:
            named = f"chat template {shown(source)}: this template cannot be used ({error})"
            raise UserError(f"{named}; set another one as dataset.chat_template") from None

    def render(self, messages: Sequence[Message], tools: list[Message] | None = None, **more: Any) -> str:
        """Return the text of numbered or unnumbered messages. Raises RenderError if the template refuses them."""
        if not messages:
            return ""
        chat = [{key: value for key, value in message.items() if key != TURN_KEY} for message in messages]
        return self._render(chat, self.source, tools, more)

    def render_marked(
        self, messages: Sequence[Message], tools: list[Message] | None = None, *, texts: bool = True, **more: Any
    ) -> Marked:
        """Return the text of numbered messages, with the positions of their turns and, with `texts`, of their texts."""
        if not messages:
            return read_marks("")
        chat = [mark_message(message) if texts else message for message in messages]
        return read_marks(self._render(chat, self._marked_source, tools, more))

    def _render(
        self, chat: Sequence[Message], source: str, tools: list[Message] | None, more: Mapping[str, Any]
    ) -> str:
        fitted = [self._fit(message) for message in chat]
        variables = {**self._tokenizer.special_tokens_map, "tools": tools, **self._variables, **more}
        try:
            # Not apply_chat_template, which removes content that is None: some templates need it with tool calls.
            with _limited_time():
                return str(render_jinja_template([fitted], chat_template=source, **variables)[0][0])
        except Exception as error:  # the template is a program of the user's and may raise anything
            raise RenderError(f"{error}" or type(error).__name__) from None

    def _fit(self, message: Message) -> Message:
        fitted = dict(message)
        if IMAGE in message["content"]:
            fitted["content"] = _split_images(message["content"])
        elif message["role"] in self._part_roles:
            fitted["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if "tool_calls" in message:
            fitted["content"] = fitted["content"] or self._call_content
            fitted["tool_calls"] = [self._fit_call(call) for call in message["tool_calls"]]
        if "reasoning_content" in message and "reasoning_content" not in self.source:
            fitted |= {name: message["reasoning_content"] for name in ("thinking", "reasoning") if name in self.source}
        return fitted

    def _fit_call(self, call: Message) -> Message:
        arguments = call["function"]["arguments"]
        if self._call_arguments is str:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _probe(self, *messages: Message, tools: list[Message] | None = None, **more: Any) -> Marked:
        """Render messages, with a tool if the template needs one."""
        numbered = [{**message, TURN_KEY: index} for index, message in enumerate(messages)]
        try:
            return self.render_marked(numbered, tools, **more)
        except RenderError:
            return self.render_marked(numbered, [_TOOL], **more)

    def _find_part_roles(self) -> None:
        """Find the roles with content that the template only reads as a list of parts."""
        try:
            texts = self._probe(_QUESTION, _ANSWER).texts
            lost = {role for turn, role in enumerate(("user", "assistant")) if turn not in texts}
        except RenderError:
            lost = {"user", "assistant"}
        if lost:
            self._part_roles = frozenset(lost | ({"system"} if "user" in lost else set()))
            if not self._probe(_QUESTION, _ANSWER).texts.keys() >= {0, 1}:
                self._part_roles = frozenset()

    def _find_call_form(self) -> None:
        """Find a form of tool calls that the template renders: arguments as a dict or JSON, content empty or None."""
        if "tool_calls" not in self.source:
            return
        for content, arguments in (("", dict), ("", str), (None, dict), (None, str)):
            self._call_content, self._call_arguments = content, arguments
            try:
                text = self.render([_QUESTION, _CALL], [_TOOL])
            except RenderError:
                continue
            # Neither Python's form of a dict nor JSON within JSON.
            if "Argument" in text and "'key'" not in text and '\\"key' not in text:
                return
        self._call_content, self._call_arguments = "", dict

    def generation_prompt(
        self, messages: Sequence[Message], tools: list[Message] | None, lead: str | None
    ) -> str | None:
        """Return the generation prompt after numbered messages; None if the template refuses them on their own.

        `lead` is the text before the answer that follows them, if known. It is the cache key of prompts, since the same
        lead after the same role has the same prompt.
        """
        key = (messages[-1]["role"] if messages else "", bool(tools), lead)
        if key not in self._prompts:
            if len(self._prompts) > 1000:  # leads that differ in every conversation
                self._prompts.clear()
            try:
                self._prompts[key] = self._observe_prompt(messages, tools)
            except RenderError:  # for example without a question
                self._prompts[key] = None
        return self._prompts[key]

    def _observe_prompt(self, messages: Sequence[Message], tools: list[Message] | None) -> str:
        before, after = (self._probe(*messages, tools=tools, add_generation_prompt=prompt) for prompt in (False, True))
        end = max((end for spans in after.turns.values() for _, end in spans), default=len(after.text))
        prompt = after.text[end:]
        # Or the prompt is part of the last turn, or no turn is left to the loop.
        return prompt if prompt.strip() else after.text[self.common_length(before.text, after.text) :]

    def common_length(self, left: str, right: str) -> int:
        """Return the length of the common beginning of two texts, without cutting an added token of the second."""
        cut = _common_length(left, right)
        for at in range(max(0, cut - max(self._added_lengths, default=0)), cut):
            if at + len(self._token_from(right, at)) > cut:
                return at
        return cut

    def common_header(self, prompt: str, block: str) -> int:
        """Return the length of the common beginning of a generation prompt and a turn, up to a line or added token end.

        More may be equal by chance, as `<t` in `<think>` and `<tool_call>`.
        """
        begin = len(block) - len(block.lstrip())
        equal = _common_length(prompt, block[begin:])
        if begin + equal == len(block):
            return len(block)
        ends = (at for at in range(equal, 0, -1) if prompt[at - 1] == "\n" or self._token_to(prompt, 0, at))
        end = next(ends, 0)
        # The turn may leave out a token of the prompt and have the next: `</think>` for `<think></think>`.
        rest, follows = prompt[end:], block[begin + end :]
        tails = (rest[at:] for at in range(len(rest)) if self._token_from(rest, at))
        tail = next((tail for tail in tails if follows.startswith(tail)), "")
        return begin + end + len(tail) if end else 0

    @property
    def usual_prompt(self) -> str:
        """The generation prompt after a question, or the text before every answer if the template has none."""
        return self.question_prompt or self._fixed_header

    @cached_property
    def writes_parallel_calls(self) -> bool:
        """Whether the template writes all calls of a turn, not only the first."""
        first, name = _CALL["tool_calls"][0], "zerolora_second"
        second = {**first, "id": "call00001", "function": {**first["function"], "name": name}}
        try:
            return name in self.render([_QUESTION, {**_CALL, "tool_calls": [first, second]}], [_TOOL])
        except RenderError:
            return True  # it refuses such turns itself

    @cached_property
    def question_prompt(self) -> str:
        """The generation prompt after a question."""
        try:
            return self._observe_prompt([_QUESTION], None)
        except RenderError:
            return ""

    @cached_property
    def _fixed_header(self) -> str:
        """The text before every answer in a template without a generation prompt; white space belongs to the answer."""
        marked = self._probe(_QUESTION, _ANSWER)
        if 1 not in marked.turns or 1 not in marked.texts:
            return ""
        header = marked.text[marked.turns[1][0][0] : marked.texts[1][0][0]]
        return header if header.strip() else ""

    @cached_property
    def closings(self) -> dict[bool, str]:
        """The token that ends an answer within a conversation, by whether it calls a tool.

        It is in the answer's turn, or the first of the next turn.
        """
        return {
            False: self._find_closing(_QUESTION, _ANSWER, _QUESTION),
            True: self._find_closing(_QUESTION, _CALL, _RESULT),
        }

    def _find_closing(self, *messages: Message) -> str:
        try:
            marked = self._probe(*messages)
        except RenderError:
            return ""
        token, stop = self.end_of_answer(marked.text, *marked.turns.get(1, [(0, 0)])[-1])
        return marked.text[len(marked.text[: stop - len(token)].rstrip()) : stop] if token else ""

    def end_of_answer(self, text: str, start: int, end: int) -> tuple[str, int]:
        """Return the token that ends an answer and where it ends: its own, or the one that begins what follows.

        A turn may close with an added token, such as `</tool_call>`, that does not end the generation.
        """
        own = self.token_at_end(text, start, end)
        if own in self.special:
            return own, start + len(text[start:end].rstrip())
        next_, stop = self.token_behind(text, end)
        if next_ in self.special or (next_ and not own):
            return next_, stop
        return own, start + len(text[start:end].rstrip()) if own else end

    def token_at_end(self, text: str, start: int, end: int) -> str:
        """Return the added token at the end of a span, ignoring white space after it."""
        return self._token_to(text, start, start + len(text[start:end].rstrip()))

    def token_behind(self, text: str, at: int) -> tuple[str, int]:
        """Return the added token after a position, ignoring white space, and its end; else "" and the position."""
        begin = len(text) - len(text[at:].lstrip())
        token = self._token_from(text, begin)
        return (token, begin + len(token)) if token and token != self._tokenizer.bos_token else ("", at)

    def _token_to(self, text: str, start: int, end: int) -> str:
        """Return the longest added token that ends at `end`, if any."""
        found = (
            text[end - n : end] for n in self._added_lengths if n <= end - start and text[end - n : end] in self._added
        )
        return next(found, "")

    def _token_from(self, text: str, at: int) -> str:
        """Return the longest added token that begins at `at`, if any."""
        return next((text[at : at + n] for n in self._added_lengths if text[at : at + n] in self._added), "")


def _split_images(text: str) -> list[Message]:
    parts: list[Message] = []
    for number, piece in enumerate(text.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return parts


def _common_length(left: str, right: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
