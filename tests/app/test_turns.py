"""Of one visitor the newest request goes on; visitors beyond the seats are told so."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy

import pytest

from mvm.app import service
from mvm.app.service import Desk, Turn


def test_only_the_newest_request_of_a_visitor_goes_on():
    one, other = Turn(), Turn()
    first, elsewhere = one.take(1), other.take(1)
    assert first()
    second = one.take(2)
    assert not first()
    assert second()
    assert elsewhere()


def test_an_older_request_that_comes_late_is_not_the_newest():
    turn = Turn()
    newer, older = turn.take(8), turn.take(7)
    assert newer()
    assert not older()


def test_of_equal_numbers_the_last_to_come_is_the_newest():
    """A visitor who numbers all requests alike has one of them made at a time, too."""
    turn = Turn()
    first, second = turn.take(1), turn.take(1)
    assert not first()
    assert second()


def test_what_is_told_waits_for_what_is_being_told(monkeypatch):
    monkeypatch.setattr(service, "LONGEST_WAIT", 60)
    turn, order = Turn(), []

    def tell(request):
        with turn.sending(request) as current:
            order.append(("newer", current))

    with ThreadPoolExecutor(1) as pool, ExitStack() as speaking:
        assert speaking.enter_context(turn.sending(turn.take(1)))
        waiting = pool.submit(tell, turn.take(2))
        time.sleep(0.1)
        order.append("older ended")
        speaking.close()
        waiting.result(10)
    assert order == ["older ended", ("newer", True)]


def test_an_older_request_does_not_wait_to_tell():
    turn = Turn()
    older, newer = turn.take(1), turn.take(2)
    with turn.sending(newer), ThreadPoolExecutor(1) as pool:

        def tell():
            with turn.sending(older) as current:
                return current

        assert pool.submit(tell).result(10) is False


def test_every_visitor_gets_a_copy():
    pattern = Turn()
    one, other = deepcopy(pattern), deepcopy(pattern)
    mine = one.take(1)
    other.take(2)
    assert mine()


def test_visitors_beyond_the_seats_are_refused_in_words_until_one_leaves():
    desk, first, second = Desk(1), Turn(), Turn()
    full = pytest.raises(ValueError, match="all 1 places of this page are taken; try again")
    with desk.seat(first), desk.seat(first), full, desk.seat(second):  # an older request of the first still leaves
        pass
    with desk.seat(second):
        pass


def test_a_seat_is_free_again_after_an_error():
    desk = Desk(1)
    with pytest.raises(KeyError), desk.seat(Turn()):
        raise KeyError
    with desk.seat(Turn()):
        pass
