"""What stands before the page: who may speak to it, to which addresses, how much and how often. Plain ASGI, no gradio.

Every program of this machine, and every web page that its browser shows, can send requests to 127.0.0.1. A browser says
in whose name it sends them (Host, Origin, Sec-Fetch-Site), and cannot be made to lie.
"""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from mvm.app.edit import MOST_UPLOAD
from mvm.untrusted import cut

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "[::1]")
JOIN, LISTEN, PICTURE = "/gradio_api/queue/join", "/gradio_api/queue/data", "/picture"
STARTED = "/gradio_api/startup-events"  # gradio asks itself once, without a token; asked again, nothing happens
# what the page itself asks for; gradio has some sixty routes more, of which several write files
READ = re.compile(
    rf"/|/config/?|/theme\.css|/favicon\.ico|/(assets|static)/.+|/gradio_api/heartbeat/\w+|{LISTEN}|{STARTED}"
)
MOST_BODY = {JOIN: 1 << 16, PICTURE: MOST_UPLOAD}  # bytes; all else is read without a body
SLOW = 30.0  # seconds within which a body must have come
MOST_OPEN = 512  # requests of one address at once: half of the files that a process may have open on most systems
MOST_WAITING = 128  # requests of one visitor that are not answered yet
MOST_AT_ONCE, MOST_PICTURES = 4, 16  # pictures that are being sent; that are kept, of all visitors
FORGOTTEN = 3600.0  # seconds for which a picture is kept
PATIENCE = 10.0  # seconds for which a request waits for somebody who listens to its answer; it has no seat until then
KEPT_OUT = [(b"x-frame-options", b"DENY"), (b"x-content-type-options", b"nosniff")]  # of other pages' frames, scripts


class Refusal(Exception):
    """A request that is not served: the status, and one line that says why."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class Audience:
    """Which visitors listen to their answers: work is begun for those alone, and ends when they are gone."""

    forget: Callable[[str], None]  # ends a visitor's requests and drops their pending messages

    def __init__(self) -> None:
        self._streams: Counter[str] = Counter()  # open ones, by visitor
        self._ears: dict[str, asyncio.Event] = {}  # set when a visitor begins to listen
        self._unheard: dict[str, float] = {}  # when the oldest request that nobody has listened to came

    async def heard(self, visitor: str) -> bool:
        """Wait until a visitor listens; return whether it does. A browser asks first, and listens a moment later."""
        if not self._streams[visitor]:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ears.setdefault(visitor, asyncio.Event()).wait(), PATIENCE)
            if visitor not in self._unheard:  # else a younger request waits with this one
                self._ears.pop(visitor, None)
        return self._streams[visitor] > 0

    @contextmanager
    def listening(self, visitor: str) -> Generator[None]:
        """Note that a visitor listens."""
        self._streams[visitor] += 1
        self._unheard.pop(visitor, None)
        if visitor in self._ears:
            self._ears.pop(visitor).set()
        try:
            yield
        finally:
            self._streams[visitor] -= 1
            if not self._streams[visitor]:
                del self._streams[visitor]
                self._look_soon(visitor)

    @contextmanager
    def asking(self, visitor: str) -> Generator[None]:
        """Note a request while it is handed on; its visitor may listen already."""
        if not self._streams[visitor]:
            self._unheard.setdefault(visitor, asyncio.get_running_loop().time())
        try:
            yield
        finally:
            self._look_soon(visitor)

    def _look_soon(self, visitor: str) -> None:
        """Drop what a visitor has asked for, unless it listens by then."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            # of a younger request, to which its visitor is about to listen, there will be a look of its own
            if not self._streams[visitor] and loop.time() - self._unheard.get(visitor, -PATIENCE) > PATIENCE * 0.9:
                self._unheard.pop(visitor, None)
                self._ears.pop(visitor, None)
                self.forget(visitor)  # at once: whoever comes to listen next must find nothing half ended

        loop.call_later(PATIENCE, look)


class Gate:
    """Passes on to the page what it would ask itself for, and answers everything else with one line.

    names: host names that are this machine's; None where the token decides. needs: the number of values of each
    function. waiting: how many requests of a visitor are unanswered; None: it has no answers to come. uploads: pictures
    by their secret names, kept in memory alone.
    """

    def __init__(
        self,
        names: frozenset[str] | None,
        token: str,
        needs: Mapping[int, int],
        waiting: Callable[[str], int | None],
        uploads: dict[str, bytes],
        audience: Audience,
    ) -> None:
        self.names, self.token, self.needs, self.waiting = names, token, needs, waiting
        self.uploads, self.audience = uploads, audience
        self.cookie = f"mvm-{secrets.token_hex(4)}"  # cookies are shared by all ports of a host
        self._open: Counter[str] = Counter()  # requests, by what they are limited by

    async def __call__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the page, or answer it."""
        if scope["type"] == "lifespan":
            return await app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})  # the page has none

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *KEPT_OUT]}
            await send(message)

        try:
            who = (scope.get("client") or ("",))[0]
            with self._counted(who, MOST_OPEN, f"{MOST_OPEN} requests of {who} are open; let some of them end"):
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                self._check_sender(scope, headers)
                if self._bears_token(scope, headers):
                    await self._serve(app, scope, headers, receive, guarded)
                else:  # its address should not keep the token
                    cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
                    await _answer(guarded, HTTPStatus.SEE_OTHER, "", location="/", **{"set-cookie": cookie})
        except Refusal as refusal:
            await _answer(guarded, refusal.status, f"{refusal}\n")

    @contextmanager
    def _counted(self, what: str, most: int, words: str) -> Generator[None]:
        """Count requests of a kind while they are open; refuse those that are too many."""
        if self._open[what] >= most:
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, words)
        self._open[what] += 1
        try:
            yield
        finally:
            self._open[what] -= 1
            if not self._open[what]:
                del self._open[what]

    def _check_sender(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Refuse what another page has sent, or made the browser send."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if self.names is not None and re.sub(r":\d+$", "", host) not in self.names:
            names = ", ".join(sorted(self.names))
            words = f"the page answers to {names}, not to '{cut(host)}'; for other machines: mvm app --share-on-network"
            raise Refusal(HTTPStatus.FORBIDDEN, words)
        if origin is not None and (not host or origin.partition("://")[2] != host):
            raise Refusal(HTTPStatus.FORBIDDEN, f"the page answers to itself alone, not to '{cut(origin)}'")
        link = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}.items() <= headers.items()
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not (link and scope["path"] == "/"):
            raise Refusal(HTTPStatus.FORBIDDEN, "another page has asked for this; open the page's own address")

    def _bears_token(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        """Return whether a request has the token as a page's own requests have it; False: in its address."""
        if not self.token or scope["path"] == STARTED:
            return True
        cookies = dict(one.strip().partition("=")[::2] for one in headers.get("cookie", "").split(";"))
        for said, found in ((cookies.get(self.cookie, ""), True), (_query(scope, "token"), False)):
            if (found or scope["path"] == "/") and secrets.compare_digest(said.encode(), self.token.encode()):
                return found
        words = "this page needs its token: open the whole address that mvm app has printed, with ?token=..."
        raise Refusal(HTTPStatus.UNAUTHORIZED, words)

    async def _serve(self, app: App, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method == "POST" and path == JOIN:
            asked = plain_request(await self._body(path, headers, receive), self.needs)
            visitor = asked["session_hash"]
            words = f"{MOST_WAITING} requests of yours are not answered yet; wait for one of them"
            most = MOST_WAITING - (self.waiting(visitor) or 0)
            with self._counted(f"asked by {visitor}", most, words), self.audience.asking(visitor):
                await app(scope, _replayed(json.dumps(asked).encode(), receive), send)
        elif method == "POST" and path == PICTURE:
            words = f"{MOST_AT_ONCE} pictures are being sent; try again in a few seconds"
            with self._counted("pictures", MOST_AT_ONCE, words):
                name = self._kept(await self._body(path, headers, receive))
            await _answer(send, HTTPStatus.OK, name)
        elif method in ("GET", "HEAD") and READ.fullmatch(path) and ".." not in path:
            visitor = _query(scope, "session_hash")
            if path == LISTEN and self.waiting(visitor) is None:
                raise Refusal(HTTPStatus.NOT_FOUND, "there is no answer of yours to listen to; ask first")
            with self.audience.listening(visitor) if path == LISTEN else nullcontext():
                await app(scope, receive, send)
        else:
            raise Refusal(HTTPStatus.NOT_FOUND, f"the page has no {method} {cut(path)}")

    async def _body(self, path: str, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Return a request's body, of bounded length, which must come in time."""
        most, body = MOST_BODY[path], bytearray()
        stated = headers.get("content-length", "")
        length = int(stated) if stated.isascii() and stated.isdecimal() and len(stated) < 20 else 0  # 0: not stated
        try:
            async with asyncio.timeout(SLOW):
                more = length <= most
                while more and len(body) <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(HTTPStatus.BAD_REQUEST, "the request ended in the middle; send it again")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            words = f"the request has not come within {SLOW:g} seconds; send it again"
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, words) from None
        if max(length, len(body)) > most:
            words = f"this has {max(length, len(body)):,} bytes or more; {most:,} are taken at most"
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, words)
        return bytes(body)

    def _kept(self, content: bytes) -> str:
        """Keep a picture in memory; return the name by which its visitor has it edited."""
        name = secrets.token_urlsafe(16)
        self.uploads[name] = content
        if len(self.uploads) > MOST_PICTURES:
            del self.uploads[next(iter(self.uploads))]
        asyncio.get_running_loop().call_later(FORGOTTEN, self.uploads.pop, name, None)
        return name


def plain_request(body: bytes, needs: Mapping[int, int]) -> dict[str, Any]:
    """Return what a request to work asks for: numbers, words and lists of them, as many as its function needs.

    Never an object: gradio takes some for files, which it would fetch or copy. Only what is known goes on.
    """
    try:
        asked = json.loads(body)
        number, values, visitor = asked["fn_index"], asked["data"], asked["session_hash"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        words = f"the request is no JSON of fn_index, data and session_hash ({cut(repr(error))})"
        raise Refusal(HTTPStatus.BAD_REQUEST, words) from None
    if type(number) is not int or number not in needs:
        words = f"fn_index={cut(number)} is no function of this page; it has {', '.join(map(str, needs))}"
    elif not isinstance(visitor, str) or not re.fullmatch(r"\w{1,64}", visitor):
        words = f"session_hash={cut(visitor)} must be 1 to 64 letters and digits"
    elif not isinstance(values, list) or len(values) != needs[number]:
        count = len(values) if isinstance(values, list) else "no list of"
        words = f"data has {count} values; function {number} takes {needs[number]}"
    elif not all(_plain(one) for value in values for one in (value if isinstance(value, list) else [value])):
        words = "data must be numbers, words and lists of them; leave out objects"
    else:
        return {"fn_index": number, "data": values, "session_hash": visitor}
    raise Refusal(HTTPStatus.BAD_REQUEST, words)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _query(scope: Scope, name: str) -> str:
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get(name, [""])[0]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a way to receive a body again that has been read; what comes after it comes as before."""
    parts: list[Message] = [{"type": "http.request", "body": body}]

    async def again() -> Message:
        return parts.pop() if parts else await receive()

    return again


async def _answer(send: Send, status: HTTPStatus, words: str, **headers: str) -> None:
    fields = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(words.encode())), **headers}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": pairs})
    await send({"type": "http.response.body", "body": words.encode()})
