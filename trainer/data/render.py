"""Rendering of conversations by a chat template, a program of the user's that may fail or never end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

# Processor time, so that a busy machine makes no difference.
LONGEST_SECONDS = 10.0
LONGEST_TEXT = 100_000_000


class RenderError(Exception):
    """A failure of a chat template."""


def render(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], template: str, **arguments: Any) -> str:
    """Return the text of a conversation.

    Raises RenderError for any exception of the template, and TimeoutError if it takes too long.
    """
    # Not apply_chat_template, which removes content that is None, although some templates need it with tool calls.
    variables = {**tokenizer.special_tokens_map, **arguments}
    try:
        with _time_limit(LONGEST_SECONDS):
            text = str(render_jinja_template([chat], chat_template=template, **variables)[0][0])
    except TimeoutError:
        raise
    except Exception as error:  # the user's program may raise anything
        raise RenderError(f"{error}" or type(error).__name__) from None
    if len(text) > LONGEST_TEXT:
        raise RenderError(f"it makes a text of {len(text):,} characters of one conversation")
    return text


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, in the main thread only, which receives the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"one conversation takes more than {seconds:g} s; check the template for an endless loop")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Repeated every second: Python ignores exceptions raised in finalizers and in callbacks of its garbage collector.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
