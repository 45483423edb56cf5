"""SIGTERM to a worker: all leave at the same step, to be started again."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

_asked: list[int] = []


def _note(number: int, _: Any) -> None:
    _asked.append(number)


def _forget_in_child() -> None:
    # A forked loader of data is to end where its parent asks it to.
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def is_asked_to_leave() -> bool:
    """Whether this process got a SIGTERM since `watched` began."""
    return bool(_asked)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, SIGTERM is noted rather than fatal, unless the program handles it.

    What came too late for the workers to leave together is delivered at the end.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    signal.signal(signal.SIGTERM, _note)
    came_late = False
    try:
        yield
        came_late = is_asked_to_leave()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _asked.clear()
    if came_late:
        signal.raise_signal(signal.SIGTERM)
