"""Ctrl-C and a scheduler's SIGTERM: half an update could not be resumed bit for bit, so it is ended first.

Until then nothing has changed but gradients: a step is given up at once, and done again when the run is resumed.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Stopped and saved as a scheduler asked by SIGTERM: no failure, so that the command ends with code 0."""


class Request(Event):
    """Set by the first signal. Inside `at_once` the signal raises KeyboardInterrupt where it arrives."""

    immediate = False

    @contextmanager
    def at_once(self) -> Generator[None]:
        """What runs inside can be given up at any time."""
        self.immediate = True
        try:
            if self.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            self.immediate = False


@contextmanager
def deferred_interrupt() -> Generator[Request]:
    """Yield an event that the first signal sets; a second one acts at once, but not under torchrun.

    torchrun passes signals on, so that one sent to all its processes arrives twice; it also kills what does not stop.
    A KeyboardInterrupt that follows on SIGTERM alone leaves as Terminated. So it does in a process of torchrun that
    got no signal: another one did, and its exit code says which.
    """
    request, under_torchrun = Request(), "TORCHELASTIC_RUN_ID" in os.environ
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    received: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        received.append(number)
        if request.is_set() and not under_torchrun:
            restore()
            signal.raise_signal(number)
        elif not under_torchrun:
            os.write(sys.stderr.fileno(), b"\nmvm: stopping; once more to leave without saving\n")
        request.set()
        if request.immediate:
            raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    except KeyboardInterrupt:
        if set(received) == {signal.SIGTERM} or (under_torchrun and not received):
            raise Terminated from None
        raise
    finally:
        restore()
