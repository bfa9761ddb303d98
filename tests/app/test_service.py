"""Requests as they are served, without a page around them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mvm.app.form import SampleForm
from mvm.app.plane import PlaneForm
from mvm.app.service import PROBLEM, Service, Shelf, Shot, Turn


@pytest.fixture
def service():
    return Service(Shelf(["digits"], torch.device("cpu")), seats=1)


def steps(form):
    for step in range(4):
        yield Shot(lambda step=step: {"step": step}, last=True)


def test_parts_come_one_by_one(service):
    assert list(service.serve(Turn(), 1, SampleForm("digits"), steps)) == [
        {PROBLEM: ""},
        *({"step": step} for step in range(4)),
    ]


def test_what_would_not_be_seen_is_left_out_but_for_the_last(service):
    def quick(form):
        yield from (Shot(lambda step=step: {"step": step}, last=step == 9) for step in range(10))

    assert list(service.serve(Turn(), 1, SampleForm("digits"), quick)) == [{PROBLEM: ""}, {"step": 0}, {"step": 9}]


def test_an_odd_value_is_told_and_nothing_is_made(service):
    (told,) = service.serve(Turn(), 1, SampleForm("digits", nfe=0), steps)
    assert "NFE is 0; it must be a whole number from 1 to 100" in told[PROBLEM]


def test_a_newer_request_ends_the_older_one(service):
    turn = Turn()
    older = service.serve(turn, 1, SampleForm("digits"), steps)
    assert [next(older) for _ in range(3)][-1] == {"step": 1}
    turn.take(2)
    assert list(older) == []
    assert len(list(service.serve(turn, 2, SampleForm("digits"), steps))) == 5
    assert list(service.serve(turn, 1, SampleForm("digits"), steps)) == []  # one that was late


def test_requests_that_wait_leave_a_thread_for_the_one_that_is_heard(service):
    """A page has so many threads; all of them used to wait for an older answer, which needed one to go on."""
    turn = Turn()
    requests = [service.serve(turn, number, SampleForm("digits"), steps) for number in range(1, 5)]
    assert next(requests[0]) == {PROBLEM: ""}  # it is heard until it is asked for more
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(list, request) for request in requests[1:]]
        assert pool.submit(list, requests[0]).result(30) == []
        assert [len(told.result(30)) for told in waiting] == [0, 0, 5]


def test_a_visitor_without_a_seat_is_told_and_served_later(service):
    sitting = service.serve(Turn(), 1, SampleForm("digits"), steps)
    next(sitting), next(sitting)
    standing = Turn()
    *_, told = service.serve(standing, 1, SampleForm("digits"), steps)
    assert "all 1 places of this page are taken; try again in a few seconds" in told[PROBLEM]
    sitting.close()  # as when the visitor leaves
    assert list(service.serve(standing, 1, SampleForm("digits"), steps))[-1] == {"step": 3}


def test_errors_are_told_in_words_and_the_seat_is_free_again(service):
    def failing(form):
        raise ValueError("no <such> thing")
        yield

    *_, told = service.serve(Turn(), 1, SampleForm("digits"), failing)
    assert "no &lt;such&gt; thing" in told[PROBLEM]
    assert list(service.serve(Turn(), 1, SampleForm("digits"), steps))[-1] == {"step": 3}


def test_a_model_or_class_that_is_not_there_is_told(service):
    for form, words in ((SampleForm("other"), "is not on this page"), (SampleForm("digits", (12,)), "classes 0 to 9")):
        *_, told = service.serve(Turn(), 1, form, service.pictures)
        assert words in told[PROBLEM]


def test_pictures_have_all_parts(service):
    *_, parts = service.serve(Turn(), 1, SampleForm("digits", nfe=2), service.pictures)
    assert set(parts) == {"ODE", "SDE", "figures", "ode-command", "ode-python", "sde-command", "sde-python"}
    assert "--rho 0 " in parts["ode-command"]
    assert "--rho 1 " in parts["sde-command"]


def test_an_ode_solver_says_why_there_is_no_sde(service):
    *_, parts = service.serve(Turn(), 1, SampleForm("digits", nfe=2, solver="euler"), service.pictures)
    assert "The solver euler solves the ODE alone" in parts["SDE"]
    assert parts["sde-command"] == parts["sde-python"] == "# euler solves the ODE alone"


def test_the_plane_ends_with_a_film(service):
    *_, parts = service.serve(Turn(), 1, PlaneForm(nfe=2), service.plane)
    assert set(parts) == {"film", "figures"}
    assert 'download="particles.webp"' in parts["film"]
    assert parts["film"].count('class="mvm-frame"') == 3


def test_a_weaker_model_of_other_data_is_told():
    service = Service(Shelf(["digits", "cifar10"], torch.device("cpu")), seats=1)
    *_, told = service.serve(Turn(), 1, SampleForm("digits", nfe=2, auto="cifar10"), service.pictures)
    assert "has samples (3, 32, 32), and &#x27;digits&#x27;, which it is to guide, has (1, 8, 8)" in told[PROBLEM]
    *_, told = service.serve(Turn(), 2, SampleForm("digits", nfe=2, auto="nowhere"), service.pictures)
    assert "model &#x27;nowhere&#x27; is not on this page" in told[PROBLEM]
