"""One conversation through a chat template, which is a program that the user brings: it may fail, or never end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

LONGEST_SECONDS = 60.0
LONGEST_TEXT = 100_000_000


class RenderError(Exception):
    """What went wrong in a template, in words."""


def render(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], template: str, **arguments: Any) -> str:
    """The text of a conversation. Raises RenderError for whatever the template raises, and if it takes too long."""
    try:
        with _time_limit(LONGEST_SECONDS):
            text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **arguments)
    except Exception as error:  # the user's program may raise anything
        raise RenderError(f"{error}" or type(error).__name__) from None
    if len(text) > LONGEST_TEXT:
        raise RenderError(f"it makes a text of {len(text):,} characters of one conversation")
    return str(text)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the block after so many seconds, in the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"one conversation takes more than {seconds:g} s; is there a loop without end?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
