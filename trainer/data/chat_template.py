"""Render chat templates, and detect which messages they accept and which text they add around answers."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import current_thread, main_thread
from time import process_time
from types import FrameType
from typing import Any

import psutil
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.config import UserError
from trainer.config.errors import to_text
from trainer.config.yaml_core import read_yaml
from trainer.data.image_parts import IMAGE_MARKER
from trainer.data.markers import TURN_KEY, ChatSpans, has_generation_blocks, mark_message, mark_template, parse_markers

Message = dict[str, Any]
_PROBES: dict[str, Message] = read_yaml(Path(__file__).with_name("probes.yaml")).tree
MAX_RENDER_SECONDS = 3
MAX_RENDER_BYTES = 1 << 30
_QUESTION, _ANSWER, _CALL, _RESULT, _TOOL = _PROBES.values()


class RenderError(Exception):
    """Raised if a chat template fails to render a conversation."""


@contextmanager
def _limit_rendering() -> Iterator[None]:
    """Raise RenderError if the block takes too much CPU time or memory. Only applies in the main thread."""
    memory: list[int] = []

    def check(number: int, frame: FrameType | None) -> None:
        memory.append(psutil.Process().memory_info().rss)
        if memory[-1] - memory[0] > MAX_RENDER_BYTES:  # before the time, which filling memory takes too
            raise RenderError(f"rendering takes more than {MAX_RENDER_BYTES >> 30} GiB of memory")
        if process_time() - started > MAX_RENDER_SECONDS:
            raise RenderError(f"rendering takes more than {MAX_RENDER_SECONDS} seconds")

    if current_thread() is not main_thread():  # only the main thread receives signals
        yield
        return
    started = process_time()
    before = signal.signal(signal.SIGPROF, check)
    signal.setitimer(signal.ITIMER_PROF, 0.1, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class ChatTemplate:
    """Renders conversations with one template, and finds the tokens that begin and end answers.

    `setting` is the value of `dataset.chat_template`, if that is where the template is from. Raises UserError if the
    template does not compile, or cannot render a question and an answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, variables: Mapping[str, Any], setting: str | None = None
    ) -> None:
        self._tokenizer, self.source, self._variables = tokenizer, source, dict(variables)
        self._prompts: dict[tuple[str, bool, str | None], str | None] = {}
        self._list_content_roles: frozenset[str] = frozenset()
        self._call_content: str | None = ""
        self._call_arguments: type = dict
        self.eos_token, self.has_generation_blocks = tokenizer.eos_token, has_generation_blocks(source)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        self.special = frozenset(name for name, special in added.items() if special or name == self.eos_token)
        self._added = frozenset(added) - {""}
        # Tokens are looked up by length, because some tokenizers have thousands of added tokens.
        self._added_lengths = sorted({len(token) for token in self._added}, reverse=True)
        try:
            self._marked_source = mark_template(source)
            self._detect_list_content_roles()
            self._detect_call_format()
        except (TemplateError, RenderError) as error:
            name = "the tokenizer's chat template" if setting is None else f"dataset.chat_template={to_text(setting)}"
            problem = f"{name}: cannot be rendered ({error})"
            raise UserError(f"{problem}; fix the template, or set another one in dataset.chat_template") from None

    def render(self, messages: Sequence[Message], tools: list[Message] | None = None, **extra_variables: Any) -> str:
        """Render messages as text, ignoring their turn numbers.

        `extra_variables` are additional template variables. Raises RenderError if the template rejects the messages.
        """
        if not messages:
            return ""
        chat = [{key: value for key, value in message.items() if key != TURN_KEY} for message in messages]
        return self._render(chat, self.source, tools, extra_variables)

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: list[Message] | None = None,
        *,
        mark_texts: bool = True,
        **extra_variables: Any,
    ) -> ChatSpans:
        """Render numbered messages; return the text and the spans of turns and, with `mark_texts`, their contents."""
        if not messages:
            return parse_markers("")
        chat = [mark_message(message) if mark_texts else message for message in messages]
        return parse_markers(self._render(chat, self._marked_source, tools, extra_variables))

    def _render(
        self, chat: Sequence[Message], source: str, tools: list[Message] | None, extra_variables: Mapping[str, Any]
    ) -> str:
        adapted = [self._adapt_message(message) for message in chat]
        variables = {**self._tokenizer.special_tokens_map, "tools": tools, **self._variables, **extra_variables}
        try:
            # Not apply_chat_template, which removes None content that some templates need in tool calls.
            with _limit_rendering():
                return str(render_jinja_template([adapted], chat_template=source, **variables)[0][0])
        except Exception as error:  # a template is user code and may raise anything
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise RenderError(f"{line}{error}" or type(error).__name__) from None

    def _adapt_message(self, message: Message) -> Message:
        adapted = dict(message)
        if IMAGE_MARKER in message["content"]:
            adapted["content"] = _split_images(message["content"])
        elif message["role"] in self._list_content_roles:
            adapted["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if "tool_calls" in message:
            adapted["content"] = adapted["content"] or self._call_content
            adapted["tool_calls"] = [self._adapt_call(call) for call in message["tool_calls"]]
        if "reasoning_content" in message and "reasoning_content" not in self.source:
            adapted |= {name: message["reasoning_content"] for name in ("thinking", "reasoning") if name in self.source}
        return adapted

    def _adapt_call(self, call: Message) -> Message:
        arguments = call["function"]["arguments"]
        if self._call_arguments is str:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _probe(self, *messages: Message, tools: list[Message] | None = None, **extra_variables: Any) -> ChatSpans:
        """Render messages, adding a tool definition if the template rejects them without one."""
        numbered = [{**message, TURN_KEY: index} for index, message in enumerate(messages)]
        try:
            return self.render_marked(numbered, tools, **extra_variables)
        except RenderError:
            return self.render_marked(numbered, [_TOOL], **extra_variables)

    def _detect_list_content_roles(self) -> None:
        try:
            texts = self._probe(_QUESTION, _ANSWER).texts
            missing = {role for turn, role in enumerate(("user", "assistant")) if turn not in texts}
        except RenderError:
            missing = {"user", "assistant"}
        if missing:
            self._list_content_roles = frozenset(missing | ({"system"} if "user" in missing else set()))
            if not self._probe(_QUESTION, _ANSWER).texts.keys() >= {0, 1}:
                self._list_content_roles = frozenset()

    def _detect_call_format(self) -> None:
        """Detect a tool-call format that the template renders: arguments as a dict or JSON, content empty or None."""
        if "tool_calls" not in self.source:
            return
        for content, arguments in (("", dict), ("", str), (None, dict), (None, str)):
            self._call_content, self._call_arguments = content, arguments
            try:
                text = self.render([_QUESTION, _CALL], [_TOOL])
            except RenderError:
                continue
            # Reject the repr of a dict, and JSON within JSON.
            if "Argument" in text and "'key'" not in text and '\\"key' not in text:
                return
        self._call_content, self._call_arguments = "", dict

    def render_generation_prompt(
        self, messages: Sequence[Message], tools: list[Message] | None, answer_header: str | None
    ) -> str | None:
        """Return the generation prompt after numbered messages; None if the template rejects them.

        Prompts are cached by the last role, the presence of tools, and `answer_header`: the text before the next
        answer, if known.
        """
        key = (messages[-1]["role"] if messages else "", bool(tools), answer_header)
        if key not in self._prompts:
            if len(self._prompts) > 1000:  # every conversation may have a different lead
                self._prompts.clear()
            try:
                self._prompts[key] = self._probe_generation_prompt(messages, tools)
            except RenderError:  # for example because there is no question
                self._prompts[key] = None
        return self._prompts[key]

    def _probe_generation_prompt(self, messages: Sequence[Message], tools: list[Message] | None) -> str:
        before, after = (self._probe(*messages, tools=tools, add_generation_prompt=prompt) for prompt in (False, True))
        end = max((end for spans in after.turns.values() for _, end in spans), default=len(after.text))
        prompt = after.text[end:]
        # If nothing is left, the prompt is part of the last turn, or no loop rendered a turn.
        return prompt if prompt.strip() else after.text[self.measure_common_prefix(before.text, after.text) :]

    def measure_common_prefix(self, left: str, right: str) -> int:
        """Return the length of the longest common prefix that does not split an added token of `right`."""
        length = _measure_common_prefix(left, right)
        for at in range(max(0, length - max(self._added_lengths, default=0)), length):
            if at + len(self._match_token_at(right, at)) > length:
                return at
        return length

    def measure_common_header(self, prompt: str, block: str) -> int:
        """Return the length of a turn's header: the prefix that it shares with a generation prompt.

        The header ends with a line or an added token. Characters after that may match by chance, such as `<t` in
        `<think>` and `<tool_call>`.
        """
        begin = len(block) - len(block.lstrip())
        equal = _measure_common_prefix(prompt, block[begin:])
        if begin + equal == len(block):
            return len(block)
        ends = (at for at in range(equal, 0, -1) if prompt[at - 1] == "\n" or self._match_token_before(prompt, 0, at))
        end = next(ends, 0)
        # The turn may omit one token of the prompt and have the next one: `</think>` for `<think></think>`.
        prompt_rest, block_rest = prompt[end:], block[begin + end :]
        tails = (prompt_rest[at:] for at in range(len(prompt_rest)) if self._match_token_at(prompt_rest, at))
        tail = next((tail for tail in tails if block_rest.startswith(tail)), "")
        return begin + end + len(tail) if end else 0

    @property
    def default_prompt(self) -> str:
        """The generation prompt after a question or, if the template has none, the text before every answer."""
        return self.question_generation_prompt or self._fixed_header

    @cached_property
    def writes_parallel_calls(self) -> bool:
        first, name = _CALL["tool_calls"][0], "zerolora_second"
        second = {**first, "id": "call00001", "function": {**first["function"], "name": name}}
        try:
            return name in self.render([_QUESTION, {**_CALL, "tool_calls": [first, second]}], [_TOOL])
        except RenderError:
            return True  # the template itself rejects such turns

    @cached_property
    def question_generation_prompt(self) -> str:
        try:
            return self._probe_generation_prompt([_QUESTION], None)
        except RenderError:
            return ""

    @cached_property
    def _fixed_header(self) -> str:
        """The text before every answer, for templates without a generation prompt; empty if it is only whitespace."""
        marked = self._probe(_QUESTION, _ANSWER)
        if 1 not in marked.turns or 1 not in marked.texts:
            return ""
        header = marked.text[marked.turns[1][0][0] : marked.texts[1][0][0]]
        return header if header.strip() else ""

    @cached_property
    def answer_end_tokens(self) -> dict[bool, str]:
        """Tokens that end answers without tool calls (key False) and with tool calls (key True).

        Each one is the last token of the answer's turn or the first token of the next turn, with any whitespace
        before it. It is empty if neither exists.
        """
        return {
            False: self._find_answer_end_token(_QUESTION, _ANSWER, _QUESTION),
            True: self._find_answer_end_token(_QUESTION, _CALL, _RESULT),
        }

    def _find_answer_end_token(self, *messages: Message) -> str:
        try:
            marked = self._probe(*messages)
        except RenderError:
            return ""
        token, stop = self.find_end_of_answer(marked.text, *marked.turns.get(1, [(0, 0)])[-1])
        return marked.text[len(marked.text[: stop - len(token)].rstrip()) : stop] if token else ""

    def find_end_of_answer(self, text: str, start: int, end: int) -> tuple[str, int]:
        """Return the token that ends an answer (its last token or the next one), and the token's end position.

        A turn may close with an added token, such as `</tool_call>`, that does not end generation.
        """
        last = self.find_token_at_end(text, start, end)
        if last in self.special:
            return last, start + len(text[start:end].rstrip())
        following, stop = self.find_token_after(text, end)
        if following in self.special or (following and not last):
            return following, stop
        return last, start + len(text[start:end].rstrip()) if last else end

    def find_token_at_end(self, text: str, start: int, end: int) -> str:
        """Return the added token at the end of a span, ignoring trailing whitespace."""
        return self._match_token_before(text, start, start + len(text[start:end].rstrip()))

    def find_token_after(self, text: str, position: int) -> tuple[str, int]:
        """Return the added token at `position`, after any whitespace, and its end; ("", position) if there is none."""
        begin = len(text) - len(text[position:].lstrip())
        token = self._match_token_at(text, begin)
        return (token, begin + len(token)) if token and token != self._tokenizer.bos_token else ("", position)

    def _match_token_before(self, text: str, start: int, end: int) -> str:
        lengths = (n for n in self._added_lengths if n <= end - start)
        return next((text[end - n : end] for n in lengths if text[end - n : end] in self._added), "")

    def _match_token_at(self, text: str, position: int) -> str:
        candidates = (text[position : position + n] for n in self._added_lengths)
        return next((candidate for candidate in candidates if candidate in self._added), "")


def _split_images(text: str) -> list[Message]:
    parts: list[Message] = []
    for number, piece in enumerate(text.split(IMAGE_MARKER)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return parts


def _measure_common_prefix(left: str, right: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
