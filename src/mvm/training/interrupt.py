"""Ctrl-C and a scheduler's SIGTERM, held back to the end of a step: half a step could not be resumed bit for bit."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupt() -> Generator[Event]:
    """Yield an event that the first signal sets; a second one acts at once, but not under torchrun.

    torchrun passes signals on, so that one sent to all its processes arrives twice; it also kills what does not stop.
    """
    asked = Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        asked.set()
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            restore()

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        restore()
