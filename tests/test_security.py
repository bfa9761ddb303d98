"""What SECURITY.md promises, looked up in the source: a call that would break a promise has no place there."""

import ast
import re
import socket
from pathlib import Path

import pytest
import torch

import mvm
from mvm.cli.look import web

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mvm"
FILES = sorted(SOURCE.rglob("*.py"))
# the modules that may use the network, each when its user asks for it
ONLINE = {"metrics/weights.py", "published/hub.py"}
NETWORK = {"urllib.request", "http", "socket", "requests", "httpx", "ftplib", "huggingface_hub", "aiohttp"}


def relative(path):
    return path.relative_to(SOURCE).as_posix()


def calls(path):
    """Yield (dotted name, call) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def every_call(*names):
    return [(relative(path), call) for path in FILES for name, call in calls(path) if name in names]


def keywords(call):
    return {word.arg: ast.unparse(word.value) for word in call.keywords}


def test_torch_files_hold_weights_only():
    found = every_call("torch.load")
    assert len(found) >= 3
    assert [(file, keywords(call)) for file, call in found if keywords(call).get("weights_only") != "True"] == []


def test_nothing_is_executed():
    banned = (
        "eval",
        "exec",
        "__import__",
        "pickle.load",
        "pickle.loads",
        "os.system",
        "torch.hub.load",
        "marshal.loads",
    )
    assert every_call(*banned) == []
    forbidden = r"trust_remote_code|allow_pickle=True|shell=True"
    assert [relative(path) for path in FILES if re.search(forbidden, path.read_text())] == []


def test_one_unpickler_and_it_knows_its_names():
    found = [relative(path) for path in FILES if "pickle.Unpickler" in path.read_text()]
    assert found == ["data/sources/arrays.py"]
    assert "def find_class" in (SOURCE / found[0]).read_text()


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_the_network_is_used_in_two_places():
    """And by transformers and diffusers, when they are given a name that is no folder."""
    found = {relative(p) for p in FILES for name in imported(p) if any(f"{name}.".startswith(f"{n}.") for n in NETWORK)}
    found -= {"integrations/diffusers/pipeline.py"}
    assert found <= ONLINE | {path for path in found if path.startswith("app/")}, found - ONLINE


def test_loading_and_sampling_open_no_connection(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"a connection was asked for: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = mvm.load("digits")
    x = mvm.noise.initial(torch.arange(1), model.sample_shape)
    assert mvm.sample(model, x, nfe=2, condition=torch.tensor([3])).isfinite().all()


def test_the_page_stays_on_this_machine(monkeypatch):
    pytest.importorskip("gradio", reason="the page needs gradio: mean-velocity-matching[web]")
    served = []
    monkeypatch.setattr("mvm.app.page.serve", lambda *given, **named: served.append((given[2], named["token"])))
    web(open=False)
    web(open=False, share_on_network=True)
    assert served[0] == ("127.0.0.1", "")
    assert (served[1][0], len(served[1][1])) == ("0.0.0.0", 22)
    (launch,) = [call for name, call in calls(SOURCE / "app" / "page.py") if name.endswith(".launch")]
    assert keywords(launch)["share"] == "False"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "SECURITY.md").read_text()))))
def test_tests_that_the_page_points_to_are_there(path):
    assert (ROOT / path).is_file()
