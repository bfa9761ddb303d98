"""One shard from one part: made in this process or in a pool, kept when whole, resumed when not."""

import json
import multiprocessing
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from mvm import files
from mvm.data.resize import NO_HEIF, RESIZES, BadImage, decode, has_heif, planes
from mvm.data.shards import Shard
from mvm.data.sources.records import MOST_CLASSES, Part, Record, most_common, natural
from mvm.untrusted import cut, plain_name, read_json, whole_numbers

NAMED = 100  # skipped records kept with their reasons


def grouped(skipped: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return how many were skipped for each reason; numbers in it, of bytes or pixels, make no other reason."""
    return most_common(Counter(re.sub(r"(?<![\w.])\d[\d,]*(x\d+)?(?![\w.])", "N", reason) for _, reason in skipped))


@dataclass(frozen=True)
class Task:
    """One shard to make: picklable, complete, and independent of the others."""

    part: Part
    number: int
    out: Path
    settings: dict[str, Any]
    classes: int | None  # None: any label from 0 on
    strict: bool

    @property
    def sidecar(self) -> Path:
        return self.out / f"shard-{self.number:05}.json"

    @property
    def images(self) -> Path:
        return self.out / f"images-{self.number:05}.npy"

    @property
    def labels(self) -> Path:
        return self.out / f"labels-{self.number:05}.npy"

    def shape(self, count: int) -> tuple[int, int, int, int]:
        size = self.settings["size"]
        return count, self.settings["channels"], size, size


@contextmanager
def landing(path: Path) -> Generator[IO[bytes]]:
    """Open a file that appears under its name when the body ends well, and leaves nothing when it does not."""
    temporary = files.temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
        files.put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # its length does not depend on shape[0], by design


def _pixels(record: Record, settings: dict[str, Any]) -> np.ndarray:
    image = decode(record.image, settings["channels"])
    try:
        return planes(RESIZES[settings["resize"]](image, settings["size"]))
    except BadImage:
        raise
    except ValueError as error:
        raise ValueError(f"'{record.name}' {error}") from None


def _check_label(record: Record, classes: int | None) -> None:
    if not 0 <= record.label < (MOST_CLASSES if classes is None else classes):
        allowed = "0 or more" if classes is None else f"0..{classes - 1}"
        raise ValueError(f"'{record.name}' has label {cut(record.label)}; allowed: {allowed}")


def _stream(task: Task, file: IO[bytes]) -> tuple[list[int], list[list[str]]]:
    """Write the pixels of each good record; return labels, and [name, reason] of each skipped one."""
    labels, skipped = [], []
    for record in task.part.read():
        _check_label(record, task.classes)
        try:
            pixels = _pixels(record, task.settings)
        except BadImage as error:
            if task.strict:
                raise ValueError(f"'{record.name}': {error}; repair it, or prepare without strict to skip it") from None
            skipped.append([record.name, str(error)])
        else:
            file.write(pixels.tobytes())
            labels.append(record.label)
    return labels, skipped


def _make(task: Task) -> dict[str, Any]:
    """Write one shard, the sidecar last; return the sidecar's contents."""
    with landing(task.images) as file:
        _write_header(file, task.shape(0))
        start = file.tell()
        labels, skipped = _stream(task, file)
        file.seek(0)
        _write_header(file, task.shape(len(labels)))
        assert file.tell() == start
    with landing(task.labels) as file:
        np.lib.format.write_array(file, np.array(labels, np.int64), allow_pickle=False)
    names = {path.name: files.sha256(path) for path in (task.images, task.labels)}
    told = {
        "settings": task.settings,
        "shard": asdict(Shard(task.images.name, task.labels.name, len(labels), names)),
        "class_counts": sorted(Counter(labels).items()),
        "skipped": {"count": len(skipped), "first": skipped[:NAMED]},
        "reasons": grouped(skipped),
    }
    files.write_text(task.sidecar, json.dumps(told))
    return json.loads(json.dumps(told))  # the same, made now or read back


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return what is told of a finished shard; ValueError where it is damaged."""
    try:
        told = read_json(path)
        shard, skipped = Shard(**told["shard"]), told["skipped"]
        for name in (shard.images, shard.labels, *shard.sha256):
            plain_name(name)
        whole_numbers(shard.count, skipped["count"], *(number for pair in told["class_counts"] for number in pair))
        whole_numbers(*told.get("reasons", {}).values())
        pairs = (*skipped["first"], *told["class_counts"])
        if not isinstance(told["settings"], dict) or not all(len(pair) == 2 for pair in pairs):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' is damaged ({cut(error)}); delete this file, and its shard is made again") from None
    return told


def _finished(task: Task) -> dict[str, Any] | None:
    """Return the sidecar of a shard that is whole on the disk."""
    if not task.sidecar.is_file():
        return None
    told = read_sidecar(task.sidecar)
    reasons = told.get("reasons")
    if reasons is None or (NO_HEIF in reasons and has_heif()):
        return None  # made before EXIF was applied, or without pictures that can be read by now
    paths = {task.out / name: expected for name, expected in told["shard"]["sha256"].items()}
    return told if all(path.is_file() and files.sha256(path) == expected for path, expected in paths.items()) else None


def _shard(task: Task) -> dict[str, Any]:
    return _finished(task) or _make(task)


def _follow_parent() -> None:
    """Make a worker die with its parent: an orphan would go on writing below a second run's feet."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends workers silently; the parent tells
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _in_pool(tasks: list[Task], workers: int) -> Iterator[dict[str, Any]]:
    # spawn: forking a process that has run torch may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _follow_parent)
    try:
        for future in as_completed([pool.submit(_shard, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool:
        raise OSError(
            "a worker was killed (out of memory?), or the calling script has no `if __name__ == '__main__':`; "
            "run again with fewer workers: finished shards are kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def all_shards(tasks: list[Task], workers: int, progress: bool) -> list[dict[str, Any]]:
    """Return every sidecar, in order."""
    stream = map(_shard, tasks) if workers == 1 else _in_pool(tasks, workers)
    done = []
    with tqdm(total=len(tasks), desc="prepare", unit="shard", disable=not progress) as bar:
        for told in stream:
            done.append(told)
            bar.set_postfix_str(f"{sum(shard['shard']['count'] for shard in done):,} images", refresh=False)
            bar.update()
    return sorted(done, key=lambda told: natural(Path(told["shard"]["images"])))
