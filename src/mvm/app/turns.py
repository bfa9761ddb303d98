"""Who is served: of each visitor the newest request alone, and so many visitors at once."""

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Turn:
    """One visitor's requests, numbered by the browser, as they may arrive out of order: only the newest goes on.

    telling: held while something is told to the visitor, so that what a newer request tells comes later.
    """

    def __init__(self) -> None:
        self._newest = 0
        self.telling = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Turn":
        """Return one for another visitor, which is what a page copies it for."""
        return Turn()

    def take(self, number: int) -> Callable[[], bool]:
        """Begin a request; return a function that tells whether it is still the newest."""
        self._newest = max(self._newest, number)
        return lambda: self._newest == number


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
