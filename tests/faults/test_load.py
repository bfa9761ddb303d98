"""A small part of tests/faults/load.py: many visitors of one page, each with an answer of their own."""

import asyncio
import os

import pytest
import torch

pytest.importorskip("gradio", reason="the page needs gradio: mean-velocity-matching[web]")

from tests.faults.load import crowd, flood, forms, leave_in_the_middle, lone_answers, memory, sampling_peak
from tests.faults.visitors import page_at

from mvm.app import page as module
from mvm.app.service import Shelf


def serve(seats):
    return module.serve(Shelf(["digits"], torch.device("cpu")), seats, "127.0.0.1", None, wait=False)


@pytest.fixture(scope="module")
def page():
    blocks, address = serve(2)
    yield page_at(address, os.getpid())
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def lone(page):
    return asyncio.run(lone_answers(page, forms(10)))


def test_answers_differ_and_repeat(page, lone):
    assert len({answer["mvm-ode"] for answer in lone}) == 10
    assert asyncio.run(lone_answers(page, forms(10)[:2])) == lone[:2]


def test_a_crowd_is_refused_in_words_and_nothing_is_mixed_up(page, lone):
    found = asyncio.run(crowd(page, forms(10), lone))
    assert (found.right, found.wrong) == (10, 0)
    assert found.refused > 0


def test_those_who_leave_give_their_seats_back(page, lone):
    asyncio.run(leave_in_the_middle(page, 2))
    assert asyncio.run(crowd(page, forms(1), lone[:1])).right == 1


def test_one_impatient_visitor_gets_the_last_answer(page, lone):
    """More requests than the page has threads."""
    answers = asyncio.run(flood(page, 60))
    assert answers[-1] == asyncio.run(lone_answers(page, forms(60)[-1:]))[0]


def test_what_is_kept_of_visitors_is_bounded(monkeypatch):
    """gradio would keep 10,000 of them, a third of a MiB each."""
    monkeypatch.setattr(module, "REMEMBERED", 4)
    blocks, address = serve(1)
    try:
        asyncio.run(memory(page_at(address, os.getpid()), 8, 1, visitors=1))
        assert len(blocks.state_holder.session_data) == 4
    finally:
        blocks.close(verbose=False)


@pytest.mark.slow
def test_memory_of_sampling_does_not_grow_with_the_images(tmp_path):
    few, _ = sampling_peak(500, tmp_path / "few.npz")
    many, _ = sampling_peak(5000, tmp_path / "many.npz")
    assert many - few < 25
