"""Of one visitor the newest request goes on; visitors beyond the seats are told so."""

from copy import deepcopy

import pytest

from mvm.app.turns import Desk, Turn


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
