"""The page before it is opened, and the command around it."""

import re
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch

import mvm
from mvm.app.service import Service, Shelf
from mvm.cli import run
from mvm.cli.look import web

page = pytest.importorskip(
    "mvm.app.page", reason="the page needs gradio: mean-velocity-matching[web]", exc_type=ImportError
)


def test_the_theme_names_no_font_to_fetch():
    theme = page.look_and_feel()["theme"]
    assert theme._stylesheets == []
    assert not theme._font_css


def test_a_page_sends_no_statistics():
    blocks = page.build(Service(Shelf(["digits"], torch.device("cpu")), 1))
    assert blocks.analytics_enabled is False


def test_a_page_starts_with_the_first_model_s_own_guidance():
    blocks = page.build(Service(Shelf(["cifar10", "digits"], torch.device("cpu")), 1))
    own = mvm.load("cifar10").recipe.sample
    starts = {part.label: part.value for part in blocks.blocks.values() if part.__class__.__name__ == "Number"}
    assert (starts["Guidance"], starts["Guide from"], starts["Guide to"]) == (own.cfg, own.low, own.high)
    assert own.guided


def holds(blocks, label):
    """Return whether a field can be seen, and what it holds."""
    part = next(part for part in blocks.blocks.values() if getattr(part, "label", "") == label)
    above = part
    while above is not None and getattr(above, "visible", True):
        above = above.parent
    return above is None, part.value


def test_internal_guidance_is_offered_where_a_model_has_an_inner_head(inner):
    assert holds(page.build(Service(Shelf(["digits"], torch.device("cpu")), 1)), "Internal guidance") == (False, 1.0)
    assert holds(page.build(Service(Shelf([inner], torch.device("cpu")), 1)), "Internal guidance") == (True, 1.0)


def test_a_weaker_model_is_one_of_the_page():
    blocks = page.build(Service(Shelf(["digits", "cifar10"], torch.device("cpu")), 1))
    assert holds(blocks, "Weaker model") == (True, "")
    assert holds(blocks, "Autoguidance") == (True, 1.0)
    part = next(part for part in blocks.blocks.values() if getattr(part, "label", "") == "Weaker model")
    assert [value for _, value in part.choices] == ["", "digits", "cifar10"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere/at-all/there"], "'nowhere/at-all/there' is neither a run or an exported model"),
        (["--queue", "0"], "queue=0 is out of range; it must be at least 1"),
        (["--device", "abacus"], "device='abacus' is not usable here"),
        (["--share"], "--share"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in; add --share-on-network"),
    ],
)
def test_the_command_refuses_in_words(words, told, capsys):
    assert run(["app", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_taken_port_is_told(capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["app", "--no-open", "--port", str(port)]) == 2
    assert f"--port {port}: cannot listen there" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-5", "0", "99999"])
def test_a_port_that_cannot_be_is_told(port, capsys):
    assert run(["app", "--no-open", "--port", port]) == 2
    assert f"port={port} is out of range; it must lie in [1, 65535]" in capsys.readouterr().err


def test_without_gradio_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "mvm.app.page")
    assert run(["app"]) == 2
    assert (
        "the page needs gradio; install it with: pip install 'mean-velocity-matching[web]'" in capsys.readouterr().err
    )


def test_the_document_tells_of_every_option():
    """The page's commands only serve, so that nothing can be typed to its end: options and defaults are compared."""
    said = (Path(__file__).parents[2] / "docs" / "how-to/page.md").read_text(encoding="utf-8")
    options = signature(web).parameters
    told = {name.removeprefix("no-") for name in re.findall(r"`--([a-z-]+)", said)}
    assert told == {name.replace("_", "-") for name in options} - {"models"}
    assert f"served at once ({options['queue'].default})" in said
    assert {"127.0.0.1", "0.0.0.0"} <= set(re.findall(r"\d+\.\d+\.\d+\.\d+", said))
