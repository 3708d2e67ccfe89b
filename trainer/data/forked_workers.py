"""Workers that a library forks, and ends by SIGTERM."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_END = {signal.SIGTERM}


class _Forks:
    """Hooks of os.fork; those of a process cannot be taken back, so they are made once and do nothing unless `end`."""

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
    """What is forked within ends on SIGTERM, however early that comes.

    Where a handler is installed CPython forgets a signal that reaches a child before its first instruction, and a pool
    that ends its workers because one has failed would wait for that one for ever.
    """
    _FORKS.end = True
    try:
        yield
    finally:
        _FORKS.end = False
