"""The page under an adversary: foreign hosts and origins, uploads, silent clients, 200 at once, absurd values."""

import asyncio
import contextlib
import json
import os
import re
import time

import httpx
import pytest
import torch

pytest.importorskip("gradio", reason="the page needs gradio: mean-velocity-matching[web]")

from tests.faults.load import client, crowd, forms, lone_answers, silent
from tests.faults.visitors import JSON, Visitor, page_at, served, started, told_of

from mvm.app import gate
from mvm.app import page as module
from mvm.app.edit import EDIT_RANGES, MOST_UPLOAD
from mvm.app.form import RANGES, SampleForm
from mvm.app.service import Shelf
from mvm.cli import run
from mvm.data import digits
from mvm.noise import MAX_SEED
from mvm.pictures import png_bytes, to_pillow

JOIN = "gradio_api/queue/join"
PHOTO = png_bytes(to_pillow(digits().images[5]))


@contextlib.contextmanager
def serving(seats=2, **how):
    blocks, address = module.serve(Shelf(["digits"], torch.device("cpu")), seats, "127.0.0.1", None, wait=False, **how)
    try:
        yield blocks, address
    finally:
        blocks.close(verbose=False)


@pytest.fixture(scope="module")
def both():
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def address(both):
    return both[1]


@pytest.fixture(scope="module")
def page(address):
    return page_at(address, os.getpid())


def refused(reply, status, *words):
    """Check that a reply is a refusal of one line, and nothing that another page could read."""
    assert reply.status_code == status, reply.text[:300]
    assert reply.headers["content-type"].startswith("text/plain")
    assert reply.text.count("\n") == 1
    assert all(word in reply.text for word in words), reply.text
    assert "access-control-allow-origin" not in reply.headers


PATHS = [("GET", ""), ("GET", "config"), ("POST", JOIN), ("GET", "gradio_api/queue/data"), ("POST", "picture"),
         ("OPTIONS", JOIN), ("POST", "gradio_api/upload")]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "0.0.0.0:7860", ""])
def test_a_name_that_is_not_ours_is_refused(address, method, path, host):
    """As of a page whose name was pointed at this machine (DNS rebinding)."""
    refused(httpx.request(method, address + path, headers={"host": host}), 403, repr(host), "--share-on-network")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_names_of_this_machine_are_answered_on_any_port(address, host):
    """Another port: forwarded by ssh -L."""
    for name in (host, f"{host}:9000"):
        assert httpx.get(address, headers={"host": name}).status_code == 200


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"])
def test_an_origin_that_is_not_the_page_itself_is_refused(address, method, path, origin):
    refused(httpx.request(method, address + path, headers={"origin": origin}), 403, repr(origin))


def test_what_another_page_embeds_is_refused_but_a_link_to_the_page_works(address):
    def came(site, mode, what):
        return {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": what}

    for site in ("cross-site", "same-site"):
        for path, mode, what in (
            ("config", "no-cors", "script"),
            ("", "navigate", "iframe"),
            ("theme.css", "navigate", "document"),
        ):
            refused(httpx.get(address + path, headers=came(site, mode, what)), 403, "another page")
        assert httpx.get(address, headers=came(site, "navigate", "document")).status_code == 200
    reply = httpx.get(address, headers=came("same-origin", "no-cors", "image"))
    assert (reply.status_code, reply.headers["x-frame-options"]) == (200, "DENY")


OPEN = {"/", "/config", "/config/", "/theme.css", "/favicon.ico", "/assets/{path}", "/static/{path}",
        "/gradio_api/heartbeat/{session_hash}", "/gradio_api/queue/data", "/gradio_api/queue/join",
        "/gradio_api/startup-events"}  # fmt: skip


def test_every_other_route_of_gradio_is_closed(both):
    blocks, address = both
    routes = {(path, method.upper()) for path, methods in blocks.app.openapi()["paths"].items() for method in methods}
    assert len(routes) > 50
    assert ("/gradio_api/upload", "POST") in routes
    for path, method in sorted(routes):
        if path not in OPEN and method != "HEAD":
            refused(httpx.request(method, address + re.sub(r"\{[^}]+\}", "x", path)[1:]), 404)
        elif method not in ("GET", "HEAD"):
            assert (path, method) == (f"/{JOIN}", "POST")
    for odd in ("assets/../config/x", "static/%2e%2e/%2e%2e/etc/passwd", "gradio_api/file=/etc/hostname", "//"):
        assert httpx.get(address + odd).status_code == 404


def test_uploads_do_not_reach_the_disk(address, tmp_path):
    """60 MB were accepted from any page, and kept after the end."""
    folder = module.gr.utils.get_upload_folder()
    before = set(os.walk(folder).__next__()[1]) if os.path.isdir(folder) else set()
    for origin in ({}, {"origin": "https://evil.example"}):
        files = [("files", (f"{i}.bin", bytes(MOST_UPLOAD // 8))) for i in range(60)]
        reply = httpx.post(f"{address}gradio_api/upload", files=files, headers=origin, timeout=60)
        assert reply.status_code in (403, 404)
    assert set(os.walk(folder).__next__()[1]) == before


def test_a_picture_is_bounded_before_it_is_read(both, monkeypatch):
    blocks, address = both

    def chunks():
        for _ in range(MOST_UPLOAD // (1 << 20) + 2):
            yield bytes(1 << 20)

    for content in (bytes(MOST_UPLOAD + 1), chunks()):
        with contextlib.suppress(httpx.WriteError):  # the door may be shut while it is still sent
            refused(httpx.post(f"{address}picture", content=content, timeout=60), 413, f"{MOST_UPLOAD:,} are taken")
    refused(httpx.post(address + JOIN, content=bytes(1 << 17)), 413, "bytes")
    name = httpx.post(f"{address}picture", content=PHOTO).raise_for_status().text
    assert blocks.app.gate.uploads[name] == PHOTO
    for _ in range(gate.MOST_PICTURES):
        other = httpx.post(f"{address}picture", content=PHOTO).text
    assert len(blocks.app.gate.uploads) == gate.MOST_PICTURES
    assert name not in blocks.app.gate.uploads
    for upload, words in (
        (other, ""),
        (name, "no longer kept; choose it again"),
        ("x" * 50, "no longer kept"),
        (7, "Your picture is 7"),
    ):
        assert words in edit_told(address, upload=upload)["mvm-edit-problem"]
    monkeypatch.setattr(gate, "SLOW", 0.2)

    async def drip():
        yield PHOTO[:9]
        await asyncio.sleep(2)

    async def send():
        async with client() as line:
            return await line.post(f"{address}picture", content=drip())

    refused(asyncio.run(send()), 408, "0.2 seconds")


def edit_told(address, **fields):
    """Return what the edit tab says in the end, by part."""
    values = {"model": "digits", "task": "inpaint", "upload": "", "drawn": 0, "wanted": -1, "strength": 0.5,
              "part": "middle", "margin": 2, "factor": 2, "std": 1, "images": 1, "seed": "0", "nfe": 2,
              "rho": 1, "cfg": 1}  # fmt: skip
    return told_of(address, "mvm-edit", [None, 1, *(values | fields).values()])


def pictures_told(address, number=1, **fields):
    """Return what the first tab says in the end, by part."""
    values = {"model": "digits", "classes": [], "images": 1, "seed": "0", "solver": "adams", "nfe": 2,
              "rho": 1, "cfg": 1, "internal": 1, "auto": "", "auto_scale": 1,
              "low": 0, "high": 1, "reference": False}  # fmt: skip
    return told_of(address, "mvm-go", [None, number, *(values | fields).values()])


def plane_told(address, **fields):
    values = {"law": "spiral", "solver": "adams", "nfe": 2, "rho": 1, "seed": "0"}
    return told_of(address, "mvm-run", [None, 1, *(values | fields).values()])


NUMBERS = [None, "", "x", True, [], [1], 10**400, -(10**400), float("nan"), float("inf"), 1e308, -1e308, "9" * 999]


@pytest.mark.parametrize(
    ("told", "problem", "field", "label", "bound", "values"),
    [
        *((pictures_told, "mvm-problem", name, bounds.label, bounds.words, NUMBERS) for name, bounds in RANGES.items()),
        *((edit_told, "mvm-edit-problem", name, EDIT_RANGES[name].label, EDIT_RANGES[name].words, NUMBERS)
          for name in ("images", "nfe", "rho", "cfg")),
        (plane_told, "mvm-plane-problem", "nfe", "NFE", "from 1 to 100", NUMBERS),
        (pictures_told, "mvm-problem", "seed", "Seed", f"from 0 to {MAX_SEED}",
         [None, "", "9" * 5000, "-1", "1.5", [], "²"]),
        (pictures_told, "mvm-problem", "number", "Number of the request", "from 0 to", NUMBERS),
        (pictures_told, "mvm-problem", "solver", "Solver", "one of adams, ", [None, "evil", 5, [], "dopri5"]),
        (pictures_told, "mvm-problem", "classes", "Classes", "the number of a class",
         [None, 7, "a", [1.5], [1e99], [None], [True], [10**300]]),
        (pictures_told, "mvm-problem", "classes", "classes", "0 to 9", [[-1], [10]]),
        (pictures_told, "mvm-problem", "model", "model", "it has: digits", [None, "../x", "/etc", 5, []]),
        (pictures_told, "mvm-problem", "auto", "model", "it has: digits", ["../x", 5, [1]]),
        (edit_told, "mvm-edit-problem", "task", "Task", "one of image-to-image, ", [None, "evil", 5, []]),
        (edit_told, "mvm-edit-problem", "part", "Part", "one of right half, ", [None, "evil", 5, []]),
        (edit_told, "mvm-edit-problem", "drawn", "Class drawn", "the number of a class", [None, "0", 0.5, [], 10**300]),
        (edit_told, "mvm-edit-problem", "drawn", "classes", "0 to 9", [-1, 10]),
        (edit_told, "mvm-edit-problem", "wanted", "Class of the results", "number of a class", [None, "0", 0.5, []]),
        (plane_told, "mvm-plane-problem", "law", "Law", "one of eight on a ring, ", [None, "evil", 5, []]),
        (plane_told, "mvm-plane-problem", "solver", "Solver", "one of adams, ", [None, "evil", 5, []]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_absurd_values_are_answered_in_words(address, told, problem, field, label, bound, values):
    """Asked directly, as no page would; some got no words at all, others an error of gradio that names no field."""
    for value in values:
        said = told(address, **{field: value})
        assert said["error"] is None
        assert said[problem].count("\n") == 0
        assert len(said[problem]) < 600
        assert label in said[problem], (value, said[problem])
        assert bound in said[problem], (value, said[problem])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (b"", "no JSON"),
        (b"[" * 60000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[]", "no JSON"),
        ({"fn_index": 0}, "no JSON of fn_index, data and session_hash (KeyError('data'))"),
        ({"fn_index": 999}, "fn_index=999 is no function of this page; it has "),
        ({"fn_index": True}, "fn_index=True is no function"),
        ({"fn_index": [1]}, "fn_index=[1] is no function"),
        ({"session_hash": "../x"}, "session_hash=../x must be 1 to 64 letters"),
        ({"session_hash": "x" * 65}, "must be 1 to 64 letters"),
        ({"data": [None]}, "data has 1 values; function "),
        ({"data": {"a": 1}}, "data has no list of values; function "),
        ({"data": "file"}, "leave out objects"),
    ],
)
def test_requests_that_no_page_sends_are_refused_in_words(page, asked, words):
    """A value that looks like gradio's files was fetched or copied to the disk, whatever its field."""
    if isinstance(asked, dict):
        data = [None] * 16
        if asked.get("data") == "file":
            data[3] = {"path": "http://127.0.0.1:9/x", "meta": {"_type": "gradio.FileData"}}
        whole = {
            "fn_index": page.function,
            "session_hash": "x",
            **({} if "fn_index" in asked and len(asked) == 1 and asked["fn_index"] == 0 else {"data": data}),
        }
        asked = json.dumps(whole | {name: value for name, value in asked.items() if value != "file"}).encode()
    refused(httpx.post(page.address + JOIN, content=asked, headers=JSON), 400, words)


def test_only_so_many_requests_of_one_visitor_wait(page, monkeypatch):
    monkeypatch.setattr(gate, "MOST_WAITING", 20)

    async def ask():
        async with client() as line:
            visitor, count = Visitor(page, line), gate.MOST_WAITING
            replies = await asyncio.gather(*(visitor.ask(form) for form in forms(count + 20)), return_exceptions=True)
            return [one for one in replies if isinstance(one, httpx.HTTPStatusError)]

    bound = soon(page)
    told = asyncio.run(ask())
    assert len(told) >= 10
    refused(told[0].response, 429, f"{gate.MOST_WAITING} requests of yours")
    assert seats_free(page) < bound


def test_only_so_many_requests_of_one_address_are_open(page, monkeypatch):
    monkeypatch.setattr(gate, "MOST_OPEN", 5)

    async def listen():
        async with client() as line:
            where = f"{page.address}gradio_api/heartbeat/"
            streams = [line.stream("GET", f"{where}x{place}") for place in range(5)]
            async with contextlib.AsyncExitStack() as open_:
                for stream in streams:
                    assert (await open_.enter_async_context(stream)).status_code == 200
                refused(await line.get(page.address), 429, "5 requests of 127.0.0.1 are open")
            await asyncio.sleep(0.5)
            assert (await line.get(page.address)).status_code == 200

    asyncio.run(listen())


def soon(page):
    """Return 5 seconds, or more where the machine is so busy that a visitor alone waits long."""
    return max(5, 25 * seats_free(page))


def seats_free(page):
    """Return after how many seconds a visitor is served."""

    async def ask():
        start = time.perf_counter()
        async with client() as line:
            while "taken" in (await Visitor(page, line).get(SampleForm("digits", nfe=1, images=1)))["mvm-problem"]:
                await asyncio.sleep(0.1)
        return time.perf_counter() - start

    return asyncio.run(ask())


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(gate, "PATIENCE", 2)


def test_silent_clients_take_no_seat_and_leave_nothing(page, both, impatient):
    """Requests that nobody listens to kept all seats until their work was done, 42 s with 200 of them."""
    bound = soon(page)
    assert asyncio.run(silent(page, 200)) < bound
    queue, audience = both[0]._queue, both[0].app.gate.audience
    kept = [queue.event_ids_to_events, queue.pending_event_ids_session, queue.pending_messages_per_session]
    kept += [audience._ears, audience._unheard, audience._streams, both[0].app.gate._open]
    end = time.monotonic() + 20
    while any(map(len, kept)) and time.monotonic() < end:
        time.sleep(0.1)
    assert [len(one) for one in kept] == [0] * len(kept)


def test_asking_again_and_again_in_silence_keeps_no_seat(page, impatient):
    async def ask():
        async with client() as line:
            visitors, end = [Visitor(page, line) for _ in range(2)], time.monotonic() + 2 * gate.PATIENCE
            while time.monotonic() < end:
                for visitor in visitors:
                    await visitor.ask(SampleForm("digits", nfe=100, images=16))
                answer = await Visitor(page, line).get(SampleForm("digits", nfe=1, images=1))
                assert "mvm-save" in answer["mvm-sde"]

    asyncio.run(ask())


def test_who_listens_late_or_again_is_answered(page, impatient):
    async def ask():
        async with client() as line:
            visitor = Visitor(page, line)
            for pause in (0, gate.PATIENCE * 0.5, gate.PATIENCE * 0.9, gate.PATIENCE * 0.5):
                event = await visitor.ask(SampleForm("digits", nfe=2))
                await asyncio.sleep(pause)
                assert "mvm-save" in (await visitor.answers({event}))[event]["mvm-sde"]

    asyncio.run(ask())


@pytest.mark.slow
def test_two_hundred_at_once_are_served_or_told():
    with served(8) as page:
        asked, bound = forms(200, nfe=1)[:8] * 25, soon(page)
        expected = asyncio.run(lone_answers(page, asked[:8])) * 25
        found = asyncio.run(crowd(page, asked, expected, again=False))
        assert (found.right + found.refused, found.wrong) == (200, 0)
        assert min(found.right, found.refused) >= 8
        assert seats_free(page) < bound
        assert asyncio.run(silent(page, 200)) < bound


# With a token, for other machines


def test_with_a_token_only_those_who_bring_it_come_in():
    with serving(token="right") as (_, address):
        bare, whole = address.partition("?")[::2]
        assert whole == "token=right"
        for path, headers in (("", {}), ("config", {}), ("?token=wrong", {}), ("?token=", {}),
                              ("config?token=right", {}),
                              ("", {"cookie": "mvm-x=right; token=right"}), ("", {"cookie": b"mvm=\xff"})):  # fmt: skip
            refused(httpx.get(bare + path, headers=headers), 401, "whole address")
        refused(httpx.post(bare + JOIN, content=b"{}"), 401)
        with httpx.Client() as browser:
            first = browser.get(address)
            assert (first.status_code, first.headers["location"]) == (303, "/")
            assert "HttpOnly; SameSite=Lax" in first.headers["set-cookie"]
            assert browser.get(bare).status_code == browser.get(f"{bare}config").status_code == 200
            assert browser.get(bare, headers={"host": "some.name"}).status_code == 200
            refused(browser.get(bare, headers={"origin": "http://evil.example"}), 403, "evil.example")
        cookie = first.headers["set-cookie"].partition(";")[0].replace("right", "wrong")
        refused(httpx.get(bare, headers={"cookie": cookie}), 401)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "some.name"])
def test_other_machines_are_let_in_with_a_token_alone(host, capsys):
    assert run(["app", "--no-open", "--host", host]) == 2
    assert f"--host {host} lets other machines in; add --share-on-network" in capsys.readouterr().err


def test_sharing_prints_an_address_with_a_token_and_nothing_is_left_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started(2, "--share-on-network", "--host", "127.0.0.1") as (address, _):
        page = address.partition("?")[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{22}", address)
        assert httpx.get(page).status_code == 401
        with httpx.Client() as browser:
            browser.get(address, follow_redirects=True).raise_for_status()
            browser.post(f"{page}picture", content=PHOTO).raise_for_status()
            assert not any(path.is_file() for path in tmp_path.rglob("*"))
            stopped = time.monotonic()
    assert time.monotonic() - stopped < 30
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []
