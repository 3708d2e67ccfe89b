"""Worker processes that a library forks and ends with SIGTERM."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_END = {signal.SIGTERM}


class _Forks:
    """Hooks of os.fork. They cannot be removed from a process, so they do nothing unless `end` is set."""

    def __init__(self) -> None:
        self.end = False
        self._blocked: set[signal.Signals | int] = set()
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        if self.end:
            self._blocked = set(signal.pthread_sigmask(signal.SIG_BLOCK, _END))

    def _in_parent(self) -> None:
        if self.end:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    def _in_child(self) -> None:
        if self.end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)


_FORKS = _Forks()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make processes forked in the block end on SIGTERM, however early it arrives.

    If a handler is installed, CPython loses a signal that reaches a child before its first instruction. A pool that
    ends its workers because one has failed would then wait forever.
    """
    _FORKS.end = True
    try:
        yield
    finally:
        _FORKS.end = False
