"""`mvm app` in a process of its own on loopback, and visitors who speak to it as its page does, without a browser."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import httpx
from gradio_client.utils import apply_diff

from mvm.app.form import SampleForm

PATIENCE = 120  # seconds that an answer may take
TOLD = ("mvm-problem", "mvm-ode", "mvm-sde")  # what is kept of an answer: its other parts tell times
JSON = {"content-type": "application/json"}
FULL = "places of this page are taken; try again in a few seconds"

Answer = dict[str, str]


@dataclass(frozen=True)
class Page:
    """A page that is served: its process, its address, the number of its function that makes pictures."""

    process: int
    address: str
    function: int
    outputs: tuple[str, ...]

    @property
    def files(self) -> int:
        """Return how many files and connections the process has open."""
        return len(os.listdir(f"/proc/{self.process}/fd"))

    @property
    def resident(self) -> float:
        """Return the memory that the process has now, in MiB."""
        told = Path(f"/proc/{self.process}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", told)[1]) / 1024


def _function(address: str, button: str = "mvm-go") -> tuple[int, tuple[str, ...]]:
    """Return the number of the function behind a button, "Make pictures" unless named, and what it fills."""
    config = httpx.get(f"{address}config", timeout=PATIENCE).json()
    names = {part["id"]: part["props"].get("elem_id") or "" for part in config["components"]}
    for function in config["dependencies"]:
        if any(names.get(part) == button for part, _ in function["targets"]):
            return function["id"], tuple(names[part] for part in function["outputs"])
    raise AssertionError(f"the page has no button {button}")


def page_at(address: str, process: int) -> Page:
    """Return a page that is served already."""
    return Page(process, address, *_function(address))


@contextlib.contextmanager
def started(seats: int, *options: str) -> Iterator[tuple[str, int]]:
    """Yield the address that `mvm app` prints as a user starts it, and its process; Ctrl-C ends it."""
    words = [sys.executable, "-u", "-m", "mvm", "app", "--no-open", "--queue", str(seats), "--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        said = ""
        while "the page is at" not in said:
            said = process.stdout.readline()
            assert said, "the page did not start"
        yield re.search(r"http://[^;]+", said)[0], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=1200)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def served(seats: int) -> Iterator[Page]:
    """Yield a page as a user serves it, on a port of its own."""
    with started(seats) as (address, process):
        yield page_at(address, process)


class Visitor:
    """One visitor: asks, is answered, may ask again or leave in the middle."""

    def __init__(self, page: Page, client: httpx.AsyncClient) -> None:
        self.page, self.client = page, client
        self.session, self.numbers = uuid.uuid4().hex, itertools.count(1)

    async def ask(self, form: SampleForm, number: int | None = None) -> str:
        """Ask for pictures; return the number of the event."""
        _, *fields = astuple(form)
        values: list[Any] = [None, number or next(self.numbers), form.model, list(fields[0]), *fields[1:]]
        asked = {"fn_index": self.page.function, "data": values, "session_hash": self.session}
        reply = await self.client.post(f"{self.page.address}gradio_api/queue/join", json=asked)
        return reply.raise_for_status().json()["event_id"]

    async def told(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the messages about all that this visitor has asked."""
        where, who = f"{self.page.address}gradio_api/queue/data", {"session_hash": self.session}
        async with self.client.stream("GET", where, params=who) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))

    async def answers(self, events: set[str]) -> dict[str, Answer]:
        """Return what each event has told in the end, once all have ended."""
        raw: dict[str, list[Any]] = {}
        found: dict[str, Answer] = {event: {} for event in events}
        left = set(events)
        async for message in self.told():
            event, data = message.get("event_id"), (message.get("output") or {}).get("data")
            if message["msg"] == "process_generating":
                raw[event] = _merged(raw.get(event), data)
                named = zip(self.page.outputs, raw[event], strict=True)
                found[event] |= {name: part for name, part in named if name in TOLD and isinstance(part, str)}
            if message["msg"] == "process_completed":
                assert message["success"], message
                left.discard(event)
            if not left:
                break
        return found

    async def get(self, form: SampleForm) -> Answer:
        """Ask; return the answer."""
        event = await self.ask(form)
        return (await self.answers({event}))[event]


def _merged(before: list[Any] | None, data: list[Any]) -> list[Any]:
    """Return the parts of an answer: the first message has them whole, each later one what differs."""
    if before is None:
        return data
    return [apply_diff(old, edits) for old, edits in zip(before, data, strict=True)]


def told_of(address: str, button: str, values: list[Any]) -> dict[str, Any]:
    """Return the parts that one press of a button with these values has filled, and `error`, what else is told."""
    function, outputs = _function(address, button)
    asked = {"fn_index": function, "data": values, "session_hash": uuid.uuid4().hex}
    reply = httpx.post(f"{address}gradio_api/queue/join", content=json.dumps(asked), headers=JSON, timeout=PATIENCE)
    if reply.status_code != 200:
        return {"error": reply.text}
    who, raw = {"session_hash": asked["session_hash"]}, None
    found: dict[str, Any] = {}
    with httpx.stream("GET", f"{address}gradio_api/queue/data", params=who, timeout=PATIENCE) as stream:
        for line in stream.iter_lines():
            message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {"msg": ""}
            if message["msg"] == "process_generating":
                raw = _merged(raw, message["output"]["data"])
                found |= {name: part for name, part in zip(outputs, raw, strict=True) if isinstance(part, str)}
            if message["msg"] == "process_completed":
                return found | {"error": message["output"].get("error")}
    raise AssertionError("no answer")
