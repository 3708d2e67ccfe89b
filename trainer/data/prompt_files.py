"""Read prompts from files in any format supported for training data."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.config import SourceSection, UserError
from trainer.data.formats import describe_type, detect_format, join_names
from trainer.data.records import Conversation, read_record
from trainer.data.source_files import READERS, build_source
from trainer.data.sources import read_rows, read_source
from trainer.data.text_files import describe_record, get_data_suffix, parse_row

Prompt = str | list[dict[str, Any]] | Conversation
"""A text, or the turns of a conversation up to the model's answer (Turns if it has tools)."""
# Fields with a prompt or a conversation, in order of precedence.
PROMPT_FIELDS = ("messages", "conversations", "prompt", "question", "instruction", "text")


def read_prompts(path: str, setting: str, origins: list[str] | None = None) -> Iterator[Prompt]:
    """Yield each record's prompt from a file, without the answers in training records.

    `setting` is the option that contains `path`, and `origins` receives the name of each record. Raises UserError for a
    file or record without a prompt.
    """
    source, number, origins = build_source(path, setting), 0, [] if origins is None else origins
    for number, row in enumerate(read_rows(read_source(source, setting, streaming=True), source, setting), start=1):
        origins.append(describe_record(f"{setting}={path}", number, row))
        yield _read_prompt(parse_row(row), origins[-1])
    if not number:
        raise UserError(f"{setting}={path}: contains no prompt; write one per line")


def read_sample_prompts(texts: Iterable[str]) -> Iterator[Prompt]:
    """Yield the prompts from `logging.sample_prompts`, including those in the files that it names.

    A single word with the suffix of a data file is a file name. Raises UserError if the file does not exist.
    """
    for text in texts:
        if not text.strip():
            raise UserError(f"logging.sample_prompts={text!r}: is empty; write a prompt, or remove it")
        is_file = get_data_suffix(Path(text)) in READERS and (len(text.split()) == 1 or os.path.isfile(text))
        yield from read_prompts(text, "logging.sample_prompts") if is_file else [text]


def format_prompt(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return str((prompt.messages if isinstance(prompt, Conversation) else prompt)[-1]["content"])


def _read_prompt(record: dict[str, Any], origin: str) -> Prompt:
    name = next((name for name in PROMPT_FIELDS if record.get(name)), None)
    if name is None:
        fields = join_names(field for field, value in record.items() if value)
        raise UserError(
            f"{origin}: has no prompt (the record has {fields}); add a string `prompt`, or turns as `messages`"
        )
    if not isinstance(record[name], str | list):
        raise UserError(f"{origin}: {name} is {describe_type(record[name])}; it must be a string or a list of turns")
    context = {key: record[key] for key in ("system", "system_prompt", "tools") if record.get(key)}
    if isinstance(record[name], str) and not record[name].lstrip().startswith("[{"):
        if context:
            problem = f"has {join_names(context)}, which only conversations can have"
            raise UserError(f"{origin}: {problem}; write the prompt as turns in `messages`")
        extra = record.get("input") if name == "instruction" else None
        return f"{record[name]}\n\n{extra}" if extra else str(record[name])
    turns = {"messages": record[name]} | context
    fmt = detect_format(SourceSection(), list(turns), turns, origin, has_chat_template=True)
    conversation = read_record(turns, fmt, origin)
    assert isinstance(conversation, Conversation)
    if conversation.images or record.get("images"):
        raise UserError(f"{origin}: has images; ask about an image with `zerolora generate RUN PROMPT --image FILE`")
    messages = conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not any(message["role"] != "system" for message in messages):
        raise UserError(f"{origin}: {name} has no question to answer; end it with a user turn")
    return Conversation(messages, conversation.tools) if conversation.tools else messages
