"""Conversations to token ids and a mask of the tokens that carry loss, through the tokenizer's own chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trainer.config import DatasetSection, UserError
from trainer.data.marks import TURN_KEY, Marked, has_generation_blocks, mark_template, mark_text, read_marks
from trainer.data.records import Turns
from trainer.data.render import RenderError, render
from trainer.data.tokens import Encoded, Span, encode_spans

_PROBE = "Sentinel"
FIX = "give dataset.chat_template with {% generation %} marks around what is to be learned, or dataset.train_on: all"


def chat_template_of(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> str | None:
    """The Jinja template to use: the configured text or file, else the tokenizer's own, or None if it has none.

    Raises UserError if `configured` looks like a file and is not there, or cannot be read.
    """
    if configured is None:
        template = tokenizer.chat_template
        return template.get("default") if isinstance(template, Mapping) else template
    if "{" in configured:
        return configured
    try:
        return Path(configured).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = "no template in it and no such file; write the template itself, or the path of a file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); name a file that this user may read"
    except ValueError as error:
        problem = f"is not UTF-8 text ({error}); save it as such"
    raise UserError(f"dataset.chat_template={configured}: {problem}")


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, section: DatasetSection, messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of a conversation up to where the assistant answers, rendered as the run renders its data.

    `messages` have a role and text content. The text holds the template's special tokens, so tokenise it without adding
    any. Raises UserError if there is no chat template, or it refuses the conversation.
    """
    template = chat_template_of(tokenizer, section.chat_template)
    if template is None:
        raise UserError("dataset.chat_template: the tokenizer has no chat template, so give one")
    chat = [dict(message) for message in messages]
    if section.system_prompt is not None and (not chat or chat[0]["role"] != "system"):
        chat.insert(0, {"role": "system", "content": section.system_prompt})
    try:
        return render(tokenizer, chat, template, add_generation_prompt=True, **section.chat_template_kwargs)
    except RenderError as error:
        raise UserError(f"the chat template refuses the conversation ({error})") from None


class ChatEncoder:
    """Renders, marks and tokenises conversations with one template.

    An assistant turn is trained from where the generation prompt ends, which is where the model takes over at
    inference, through its end-of-turn token. Of the other roles the text and the end-of-turn token are trained if asked
    for, and not the tags that the template writes around the text. Raises UserError if the template does not compile.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, train_on: Sequence[str], system_prompt: str | None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.train_on = frozenset(train_on)
        self.system_prompt = system_prompt
        try:
            self.marked_template = mark_template(template)
            self.header = self._assistant_header()
        except (TemplateError, RenderError) as error:
            raise UserError(f"dataset.chat_template: the template cannot be used ({error})") from None
        self.end_tokens = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
        self.has_generation_blocks = has_generation_blocks(template)

    def encode(self, conversations: Sequence[Turns], where: Sequence[str]) -> list[Encoded]:
        """Token ids and trained mask of each conversation; `where` names the records in the UserErrors of bad ones."""
        chats = [self._numbered(conversation) for conversation in conversations]
        for conversation, place in zip(conversations, where, strict=True):
            self._check_tools(conversation, place)
        tools = [conversation.tools for conversation in conversations]
        marked_chats = [
            self._with_marked_texts(chat, conversation.silent)
            for chat, conversation in zip(chats, conversations, strict=True)
        ]
        marked = [read_marks(text) for text in self._render(marked_chats, tools, where, self.marked_template)]
        plain = self._render([_without_numbers(chat) for chat in chats], tools, where, self.template)
        spans: list[list[Span]] = []
        for index, (marks, text) in enumerate(zip(marked, plain, strict=True)):
            if "all" in self.train_on:
                spans.append([(0, len(text))])
                continue
            if marks.text != text:
                raise UserError(f"{where[index]}: turns cannot be told apart in this tokenizer's chat template; {FIX}")
            spans.append(self._trained_spans(chats[index], conversations[index].silent, marks, where[index]))
        return encode_spans(self.tokenizer, plain, spans, where)

    def _numbered(self, conversation: Turns) -> list[dict[str, Any]]:
        """The messages with their numbers; the system turn that is put before them takes the number after the last."""
        messages = [{**message, TURN_KEY: index} for index, message in enumerate(conversation.messages)]
        if self.system_prompt is not None and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt, TURN_KEY: len(messages)})
        return messages

    def _with_marked_texts(self, chat: list[dict[str, Any]], silent: frozenset[int]) -> list[dict[str, Any]]:
        """The texts to be trained of all roles but the assistant's, whose turns are trained with their tags."""
        return [
            message | {"content": mark_text(message["content"], message[TURN_KEY])}
            if message["role"] in self.train_on - {"assistant"} and message[TURN_KEY] not in silent
            else message
            for message in chat
        ]

    def _render(
        self,
        chats: Sequence[list[dict[str, Any]]],
        tools: Sequence[list[dict[str, Any]] | None],
        where: Sequence[str],
        template: str,
    ) -> list[str]:
        texts: list[str] = []
        for chat, tool, place in zip(chats, tools, where, strict=True):
            if not chat:
                texts.append("")
                continue
            try:
                texts.append(render(self.tokenizer, chat, template, tools=tool))
            except RenderError as error:
                raise UserError(f"{place}: the chat template refuses it ({error})") from None
        return texts

    def _trained_spans(
        self, chat: list[dict[str, Any]], silent: frozenset[int], marks: Marked, where: str
    ) -> list[Span]:
        spans: list[Span] = []
        for message in chat:
            role, turn = message["role"], message[TURN_KEY]
            if role not in self.train_on or turn in silent:
                continue
            blocks = marks.turns.get(turn, [])
            texts = marks.texts.get(turn, [])
            if not blocks and not texts and (message["content"].strip() or message.get("tool_calls")):
                raise UserError(f"{where}: the chat template leaves no trace of {role} turn {turn + 1}; {FIX}")
            if role != "assistant":
                ends = [self._end_token_of(marks.text, start, end) for start, end in blocks]
                spans += _with_white_space([*texts, *ends[-1:]], marks.text)
                continue
            for start, end in blocks:
                if self.has_generation_blocks:
                    inside = [span for span in marks.generation if start <= span[0] and span[1] <= end]
                    spans += [(begin, self._with_end_token(marks.text, stop, end)) for begin, stop in inside]
                else:
                    # Not at the block's start where the template writes its default system prompt with the first turn.
                    at = marks.text.find(self.header, start, end)
                    start = at + len(self.header) if at >= 0 else start
                    spans.append((start, self._end_of_turn(marks.text, start, end)))
        return sorted(span for span in spans if span[0] < span[1])

    def _end_token_of(self, text: str, start: int, end: int) -> Span:
        """The end-of-turn token at the end of a block, or nothing where a tag is closed there: [/INST], </result>."""
        stop = start + len(text[start:end].rstrip())
        token = max((token for token in self.end_tokens if text.endswith(token, start, stop)), key=len, default="")
        closes = token.startswith(("</", "[/")) and token != self.tokenizer.eos_token
        return (stop if closes else stop - len(token), stop)

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Through the end-of-turn token; the line break that templates put behind it is not for the model to write."""
        stop = start + len(text[start:end].rstrip())
        return stop if text.endswith(self.end_tokens, start, stop) else end

    def _with_end_token(self, text: str, stop: int, end: int) -> int:
        """A generation block extended by the end-of-turn token right behind it, where its author stopped short."""
        return stop + max((len(token) for token in self.end_tokens if text.startswith(token, stop, end)), default=0)

    def _assistant_header(self) -> str:
        """What a template writes before an answer, in training and as generation prompt alike."""
        question = [{"role": "user", "content": _PROBE}]
        answered = [*question, {"role": "assistant", "content": _PROBE}]
        numbered = [{**message, TURN_KEY: index} for index, message in enumerate(answered)]
        asked = render(self.tokenizer, question, self.template)
        prompted = render(self.tokenizer, question, self.template, add_generation_prompt=True)
        marked = read_marks(render(self.tokenizer, numbered, self.marked_template))
        prompt = prompted[len(_common_prefix(asked, prompted)) :]
        block = next((marked.text[start:end] for start, end in marked.turns.get(1, [])), "")
        lead = block[: max(block.find(_PROBE), 0)]
        # A template may begin the answer itself in its generation prompt (<think>): only what both share is header.
        # White space alone belongs to the answer: "[/INST] answer".
        return _common_prefix(prompt, lead) if prompt else (lead if lead.strip() else "")

    def _check_tools(self, conversation: Turns, where: str) -> None:
        calls = any("tool_calls" in message for message in conversation.messages)
        if calls and "tool_calls" not in self.template:
            raise UserError(
                f"{where}: has tool calls, which this tokenizer's chat template does not write; "
                "give dataset.chat_template one that does"
            )
        if conversation.tools and "tools" not in self.template:
            raise UserError(
                f"{where}: has tools, which this tokenizer's chat template does not write; "
                "give dataset.chat_template one that does, or remove them"
            )


def _with_white_space(spans: list[Span], text: str) -> list[Span]:
    """Spans with nothing but white space between them as one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and not text[joined[-1][1] : start].strip():
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _without_numbers(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != TURN_KEY} for message in chat]


def _common_prefix(left: str, right: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]
