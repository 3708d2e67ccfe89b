"""Render conversations through a chat template, which is a program that the user brings: it may fail, or never end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

# Of processor time, so that a busy machine makes no difference.
LONGEST_SECONDS = 10.0
LONGEST_TEXT = 100_000_000


class RenderError(Exception):
    """What went wrong in a template, in words."""


def render(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], template: str, **arguments: Any) -> str:
    """Return the text of a conversation.

    Raises RenderError for whatever the template raises, and TimeoutError if it takes too long.
    """
    # Not apply_chat_template, which removes content that is None: some templates ask for it with tool calls.
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
    """Raise TimeoutError in the block after so many seconds, in the main thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"one conversation takes more than {seconds:g} s; is there a loop without end?")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again every second: Python ignores what is raised while a finalizer or a callback of its collector runs.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
