"""Ctrl-C and a scheduler's SIGTERM, held back to the end of a step: half a step could not be resumed bit for bit."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Stopped and saved as a scheduler asked by SIGTERM: no failure, so that the command ends with code 0."""


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def deferred_interrupt() -> Generator[Event]:
    """Yield an event that the first signal sets; a second one acts at once, but not under torchrun.

    torchrun passes signals on, so that one sent to all its processes arrives twice; it also kills what does not stop.
    A KeyboardInterrupt that follows on SIGTERM alone leaves as Terminated. So it does in a process of torchrun that
    got no signal: another one did, and its exit code tells which.
    """
    asked = Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        received.append(number)
        if asked.is_set() and not _under_torchrun():
            restore()
            signal.raise_signal(number)
        asked.set()

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield asked
    except KeyboardInterrupt:
        if set(received) == {signal.SIGTERM} or (_under_torchrun() and not received):
            raise Terminated from None
        raise
    finally:
        restore()
