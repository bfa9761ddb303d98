"""Who is served: of each visitor the newest request alone, and so many visitors at once."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

LISTENING = 2.0  # seconds that a request waits at most for an older one of its visitor to end its sentence
GLANCE = 0.02  # seconds between two looks, while it waits, whether a newer one has come


class Turn:
    """One visitor's requests, numbered by the browser, as they may arrive out of order: only the newest goes on.

    Of equal numbers, which no browser sends, the one that came last is the newest.
    """

    def __init__(self) -> None:
        self._newest = (0, 0)
        self._arrivals = itertools.count(1)
        self._telling = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Turn":
        """Return one for another visitor, which is what a page copies it for."""
        return Turn()

    def take(self, number: int) -> Callable[[], bool]:
        """Begin a request; return a function that tells whether it is still the newest."""
        mine = (number, next(self._arrivals))
        self._newest = max(self._newest, mine)
        return lambda: self._newest == mine

    @contextmanager
    def telling(self, newest: Callable[[], bool]) -> Generator[bool]:
        """Hold the visitor's ear, so that what a newer request tells comes later; yields whether to tell anything.

        An older request does not wait for it, and none waits for long: the one that holds it needs a thread to go on,
        and those that wait could have taken all threads of the page.
        """
        end = time.monotonic() + LISTENING
        while not (held := self._telling.acquire(timeout=GLANCE)) and newest() and time.monotonic() < end:
            pass
        try:
            yield newest()
        finally:
            if held:
                self._telling.release()


class Desk:
    """Seats for visitors; requests of one visitor share a seat, for all but the newest are about to leave."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self._sitting: Counter[Turn] = Counter()
        self._alone = threading.Lock()

    @contextmanager
    def seat(self, turn: Turn) -> Generator[None]:
        """Hold a seat; where all are taken, a ValueError says so."""
        with self._alone:
            if turn not in self._sitting and len(self._sitting) >= self.seats:
                raise ValueError(f"all {self.seats} places of this page are taken; try again in a few seconds")
            self._sitting[turn] += 1
        try:
            yield
        finally:
            with self._alone:
                self._sitting[turn] -= 1
                if not self._sitting[turn]:
                    del self._sitting[turn]
