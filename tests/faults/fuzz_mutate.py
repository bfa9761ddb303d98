"""Ways to spoil a file: bytes without knowing the format, text and JSON with knowing it."""

import io
import json
import random
import re
import struct
import zipfile
from collections.abc import Callable
from copy import deepcopy
from typing import Any

HOSTILE_NUMBERS = (
    "-1",
    "0",
    "1",
    "255",
    "65536",
    "2147483648",
    "-9223372036854775809",
    "1" + "0" * 12,
    "1" + "0" * 400,
)
HOSTILE_WORDS = ("NaN", "-Infinity", "1e999", "1e-400", "true", "null", '""', "[]", "{}", "0x10", "'''")
HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 63, 10**12, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf")),
    *("", "x", "nan", "../../escape", "/etc/passwd", "\x00", "\x1b[2J", "\ud800", "ü" * 300, "a" * 20_000),
    *([], [[]], {}, {"": {}}, [1, "2", None], {"a": [1]}, [10**30] * 3),
)
DEEP = 100_000  # brackets: far more than Python's recursion limit
EDGES = (0, 1, 127, 128, 255, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 60, (1 << 64) - 1)


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _insert(rng: random.Random, data: bytearray) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.choice((1, 2, 7, 64, 5000)))


def _remove(rng: random.Random, data: bytearray) -> None:
    place = rng.randrange(len(data))
    del data[place : place + rng.choice((1, 2, 8, 100))]


def _repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.choice((1, 4, 64, 1000))]
    place = rng.randrange(len(data) + 1)
    data[place:place] = piece * rng.choice((1, 2, 50))


def _edge(rng: random.Random, data: bytearray) -> None:
    width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    place = rng.randrange(len(data))
    number = rng.choice(EDGES) % (1 << 8 * width)
    data[place : place + width] = number.to_bytes(width, order)


def _swap(rng: random.Random, data: bytearray) -> None:
    first, second = rng.randrange(len(data)), rng.randrange(len(data))
    size = rng.choice((1, 8, 60))
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]


BLIND: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _cut, _insert, _remove, _repeat, _edge, _swap)


def spoiled_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with one to four blind changes; the first kilobyte, where headers are, is hit more often."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not found:
            break
        change = rng.choice(BLIND)
        if len(found) > 1024 and change is not _cut and rng.random() < 0.5:
            head = found[:1024]
            change(rng, head)
            found[:1024] = head
        else:
            change(rng, found)
    return bytes(found)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of nested lists and dicts."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in pairs for place in ((value, key), *_places(child))]


def spoiled_json(rng: random.Random, data: bytes) -> bytes:
    """Return JSON with a value replaced, removed, renamed, or nested; or its text spoiled."""
    if rng.random() < 0.35:
        return spoiled_text(rng, data)
    value = [json.loads(data)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = _places(value)
        container, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.7:
            container[key] = deepcopy(rng.choice(HOSTILE_VALUES))
        elif kind < 0.8:
            del container[key]
        elif kind < 0.9 and isinstance(container, dict):
            container[rng.choice(("", "x", "__class__", "../x", "name", str(key) * 2))] = container.pop(key)
        else:
            container[key] = [deepcopy(container[key]) for _ in range(rng.choice((1, 2, 1000)))]
        if not value:
            return b""
    return json.dumps(value[0], ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _deep(rng: random.Random, text: str) -> str:
    bracket = rng.choice(("[", '{"a":', "[[", "{a=", "x."))
    place = rng.randrange(len(text) + 1)
    return text[:place] + bracket * DEEP + text[place:]


def _one_number(rng: random.Random, text: str) -> str:
    numbers = list(re.finditer(r"-?\d+(\.\d+)?(e-?\d+)?", text))
    if not numbers:
        return text
    found = rng.choice(numbers)
    return text[: found.start()] + rng.choice(HOSTILE_NUMBERS + HOSTILE_WORDS) + text[found.end() :]


def _one_line(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    kind = rng.randrange(3)
    if kind == 0:
        lines.insert(rng.randrange(len(lines) + 1), lines[place])  # a key twice
    elif kind == 1:
        del lines[place]
    else:
        lines[place] = rng.choice(("= 1", "[x", "x = [", '"a": 1,', "\x00", "base = 'digits'", "[[a]]", "a.b.c = 1"))
    return "\n".join(lines)


def _one_word(rng: random.Random, text: str) -> str:
    words = list(re.finditer(r"[A-Za-z_\"']+", text))
    if not words:
        return text
    found = rng.choice(words)
    return text[: found.start()] + rng.choice((*HOSTILE_WORDS, "x", "../x")) + text[found.end() :]


def spoiled_text(rng: random.Random, data: bytes) -> bytes:
    """Return text with a number, a word or a line changed, deep nesting, or its bytes spoiled (no UTF-8 any more)."""
    kind = rng.random()
    if kind < 0.25:
        return spoiled_bytes(rng, data)
    text = data.decode()
    for _ in range(rng.choice((1, 1, 2))):
        change = _deep if rng.random() < 0.01 else rng.choice((_one_number, _one_number, _one_line, _one_word))
        text = change(rng, text)
    return text.encode()


def spoiled_npy(rng: random.Random, data: bytes) -> bytes:
    """Return an .npy whose header is spoiled as text, or all of it blindly."""
    length = int.from_bytes(data[8:10], "little")
    if rng.random() < 0.4:
        return spoiled_bytes(rng, data)
    header = spoiled_text(rng, data[10 : 10 + length])[:60_000]
    return data[:8] + struct.pack("<H", len(header)) + header + data[10 + length :]


def spoiled_npz(rng: random.Random, data: bytes) -> bytes:
    """Return an .npz one of whose arrays is spoiled, under a right checksum; or all of it blindly."""
    if rng.random() < 0.4:
        return spoiled_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    members[name] = spoiled_npy(rng, members[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, contents in members.items():
            archive.writestr(name, contents)
    return buffer.getvalue()


def spoiled_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Return safetensors whose header is spoiled as JSON, or its length, or all of it blindly."""
    length = int.from_bytes(data[:8], "little")
    kind = rng.random()
    if kind < 0.3:
        return spoiled_bytes(rng, data)
    if kind < 0.4:
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 1 << 31, 1 << 60, (1 << 64) - 1))) + data[8:]
    header = spoiled_json(rng, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]
