"""Turn any source into shards of equal images: in parallel, restartable, each file whole or absent.

A shard is made from one part of the source, in this process or in a pool. Its sidecar shard-00000.json, written last,
has its checksums and what was skipped; index.json sums them up, and then the sidecars go.
"""

import multiprocessing
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from math import prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from mvm.data.loader import IMAGENET
from mvm.data.resize import MODES, NO_HEIF, RESIZES, BadImage, Size, decode, has_heif, planes, resolve, sides
from mvm.data.shards import CAPTION, DTYPES, Prepared, Shard, StoredCondition, open_prepared
from mvm.data.sources import PART_SIZE, ConditionKeys, DataSource, SourcePart, SourceRecord, open_source
from mvm.data.sources.arrays import channels_last
from mvm.data.sources.records import MOST_CLASSES, most_common, natural, numbered, stamp_of
from mvm.files import atomic, recover_all, sha256
from mvm.options import at_least, choose
from mvm.store import INDEX, ArrayStore, as_json
from mvm.untrusted import MOST_CAPTION, MOST_LISTED, MOST_PICTURE, cut, plain_name, printable, whole_numbers

NAMED = 100  # skipped records kept with their reasons
LISTED = 20  # classes in a description
GOOD = "good"
MASK = np.dtype(np.bool_)

_OURS = r"(images|labels|condition|mask)-\d{5,}\.npy|(shard|condition)-\d{5,}\.json|index\.json"

# --- rows: a sample, and its condition: an array, with a mask of tokens; or a text ---------------------------------


def _numbers(value: Any, shape: tuple[int, ...], dtype: np.dtype, what: str = "") -> np.ndarray:
    """Return finite numbers of this shape and type; what: begins the error, behind the name of the row."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in "fiub" or (dtype == np.uint8 and array.dtype != dtype):
        raise ValueError(f"{what}is {array.dtype} of shape {array.shape}, not {dtype} of {shape} as the first one is")
    with np.errstate(over="ignore"):
        row = array.astype(dtype)
    if not np.isfinite(row).all():
        raise ValueError(f"{what}holds NaN or Inf as {dtype}; repair this row, or leave it out")
    return row


def _text(value: Any, what: str = CAPTION) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise ValueError(f"{what} is no UTF-8 text") from None
    if not isinstance(text, str) or len(text.encode(errors="replace")) > MOST_CAPTION:
        raise ValueError(f"{what} must be text of at most {MOST_CAPTION:,} bytes")
    return str(text)  # numpy has a type of its own


def _is_picture(value: Any) -> bool:
    return isinstance(value, bytes) or value.dtype == np.uint8


@dataclass(frozen=True)
class RowFormat:
    """Shape and values of samples, (C, *space), how a condition is stored, and how pictures are made to fit."""

    shape: tuple[int, ...]
    values: str = "uint8"
    condition: StoredCondition | None = None
    size: Size | None = None  # None: arrays, kept as they are
    resize: str = "none"

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and type of a row of each array, by the names of their files."""
        stored, arrays = self.condition, {"images": (self.shape, DTYPES[self.values])}
        if stored is not None and stored.kind != CAPTION:
            arrays["condition"] = (stored.row(self.shape[1:]), np.dtype(stored.dtype))
        if stored is not None and stored.length:
            arrays["mask"] = ((stored.length,), MASK)
        return arrays

    def row(self, record: SourceRecord) -> tuple[Any, ...]:
        """Return what is stored of a record; BadImage where it is a picture that cannot be read."""
        if self.size is None:
            sample = _numbers(record.image, self.shape, DTYPES[self.values])
        else:
            sample = self._picture(record.image, self.size)
        return (sample, *self._condition(*record.condition))

    def _picture(self, image: bytes | np.ndarray, size: Size) -> np.ndarray:
        return planes(RESIZES[self.resize](decode(image, self.shape[0]), size))

    def _condition(self, value: Any = None, mask: Any = None) -> tuple[Any, ...]:
        stored = self.condition
        if stored is None:
            return ()
        if stored.kind == CAPTION:
            return (_text(value),)
        if stored.kind == "image" and self.size is not None and stored.dtype == "uint8" and _is_picture(value):
            image = value if isinstance(value, bytes) else channels_last(value[None], "its image")[0]
            return (self._picture(image, self.size),)
        value = np.atleast_1d(value) if stored.kind == "vector" else value
        row = _numbers(value, stored.row(self.shape[1:]), np.dtype(stored.dtype), f"{stored.kind} ")
        if stored.kind != "tokens":
            return (row,)
        of_token = np.ones(stored.length) if mask is None else mask
        of_token = _numbers(of_token, (stored.length,), np.dtype(np.float32), "mask ")
        if not np.isin(of_token, (0, 1)).all() or not of_token.any():
            raise ValueError("mask must hold 0 and 1 alone, and 1 for at least one token")
        return row, of_token.astype(MASK)


def _stored(keys: ConditionKeys, first: SourceRecord, row: RowFormat) -> StoredCondition:
    """Return how a condition is stored, as the first sample has it."""
    value, what = first.condition[0], f"'{first.name}' {keys.kind} '{keys.keys[0]}'"
    if keys.kind == CAPTION:
        _text(value, what)
        return StoredCondition(CAPTION)
    if keys.kind == "image" and row.size is not None and _is_picture(value):
        return StoredCondition("image", row.shape[0], dtype="uint8")
    array = np.asarray(value)
    there = f"{what} is {array.dtype} of shape {array.shape}"
    if not array.size:
        raise ValueError(f"{there}, which holds nothing; leave the condition out")
    if keys.kind == "vector" and array.ndim < 2:
        return StoredCondition("vector", array.size, dtype="float32")
    if keys.kind == "tokens" and array.ndim == 2:
        length, width = array.shape
        return StoredCondition("tokens", width, length, "float16" if array.dtype == "float16" else "float32")
    if keys.kind == "image" and array.shape[1:] == row.shape[1:]:
        return StoredCondition("image", array.shape[0], dtype="uint8" if array.dtype == "uint8" else "float32")
    needed = {"vector": "(width,)", "tokens": "(length, width)", "image": f"(C, *{row.shape[1:]})"}[keys.kind]
    raise ValueError(f"{there}; {needed} is needed for each sample")


def _first(source: DataSource) -> SourceRecord:
    for part in source.parts:
        for record in part.read():
            return record
    raise ValueError(f"'{source.name}' has no sample")


def row_format(
    source: DataSource, size: Size | None, resize: str, channels: int | None, values: str, keys: ConditionKeys | None
) -> RowFormat:
    """Return the format of a source's rows: by the options where pictures are resized, else as the first row has it."""
    if size is not None:
        if values:
            raise ValueError(f"values='{values}' is for arrays that are kept as they are; leave size={size} out")
        row = RowFormat((channels or 3, *sides(size)), size=size, resize=resolve(resize, size))
    else:
        first = _first(source)
        image = np.asarray(first.image)
        inferred = {"f": "float", "u": "uint8" if image.dtype == np.uint8 else ""}.get(image.dtype.kind, "")
        if not (values or inferred):
            raise ValueError(f"'{first.name}' is {image.dtype}; give values='float' to keep it as float32")
        row = RowFormat(image.shape, choose("values", values or inferred, {name: name for name in DTYPES}))
        if row.values == "uint8" and image.dtype != np.uint8:
            raise ValueError(f"values='uint8': '{first.name}' is {image.dtype}; leave values out, or give float")
        if resize not in ("auto", "none") or channels not in (None, row.shape[0]):
            given = f"resize='{resize}', channels={channels}: without a size arrays are kept as they are"
            raise ValueError(f"{given}, {row.shape} each; leave both out, or give a size")
    if keys is not None:
        row = replace(row, condition=_stored(keys, _first(source), row))
    for name, (shape, dtype) in row.arrays.items():
        if prod(shape) * dtype.itemsize > MOST_PICTURE:
            raise ValueError(f"{name}: a row of {dtype} {shape} takes more than {MOST_PICTURE:,} bytes; shrink it")
    return row


# --- shards -------------------------------------------------------------------------------------------------------


def grouped(skipped: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return how many were skipped for each reason; numbers in it, of bytes or pixels, make no other reason."""
    return most_common(Counter(re.sub(r"(?<![\w.])\d[\d,]*(x\d+)?(?![\w.])", "N", reason) for _, reason in skipped))


ValueStatistics = tuple[int, float, float, float]  # count, mean, sum of squared deviations, largest absolute value


def _merged(one: ValueStatistics, other: ValueStatistics) -> ValueStatistics:
    """Return the statistics of both: Chan, Golub and LeVeque's update, which keeps digits where std << mean."""
    count, step = one[0] + other[0], other[1] - one[1]
    mean, more = one[1] + step * other[0] / count, step * step * one[0] * other[0] / count
    return count, mean, one[2] + other[2] + more, max(one[3], other[3])


def _read_sidecar(store: ArrayStore, name: str) -> dict[str, Any]:
    """Return the facts about a finished shard; ValueError where they are damaged."""
    facts = store.table(name)
    with store.reading(name):
        shard, skipped = Shard(**facts["shard"]), facts["skipped"]
        for file in (*shard.files, *shard.sha256):
            plain_name(file)
        if len(tuple(map(float, facts.get("statistics", (0,) * 4)))) != 4:
            raise ValueError("its statistics are no four numbers")
        whole_numbers(shard.count, skipped["count"], *(number for pair in facts["class_counts"] for number in pair))
        whole_numbers(*facts.get("reasons", {}).values())
        pairs = (*skipped["first"], *facts["class_counts"])
        if not isinstance(facts["settings"], dict) or not all(len(pair) == 2 for pair in pairs):
            raise TypeError("its parts do not fit each other")
    return facts


@contextmanager
def _growing(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Generator[Callable[[np.ndarray], None]]:
    """Yield what appends a row to an .npy, which is whole under its name when the context ends."""
    count = 0

    def append(row: np.ndarray) -> None:
        nonlocal count
        file.write(np.ascontiguousarray(row, dtype).tobytes())
        count += 1

    def write_header() -> None:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count, *shape)}
        np.lib.format.write_array_header_1_0(file, header)  # its length does not depend on shape[0], by design

    with atomic(path) as temporary, temporary.open("wb") as file:
        write_header()
        start = file.tell()
        yield append
        file.seek(0)
        write_header()
        assert file.tell() == start


def _shard(
    store: ArrayStore,
    settings: dict[str, Any],
    row_format: RowFormat,
    classes: int | None,  # None: any label from 0 on
    strict: bool,
    number: int,
    part: SourcePart,
) -> dict[str, Any]:
    """Return the sidecar of a shard: that on the disk where the shard is whole, else the shard is made."""
    sidecar = f"shard-{number:05}.json"
    if (store.folder / sidecar).is_file():
        facts = _read_sidecar(store, sidecar)
        reasons = facts.get("reasons")
        # None: made before EXIF was applied; NO_HEIF: without pictures that can be read by now
        if reasons is not None and not (NO_HEIF in reasons and has_heif()) and store.is_whole(facts["shard"]["sha256"]):
            return facts

    files = {name: f"{name}-{number:05}.npy" for name in row_format.arrays}
    labels: list[int] = []
    captions: list[str] = []
    statistics: list[ValueStatistics] = []  # of floats
    skipped: list[tuple[str, str]] = []  # name, reason
    with ExitStack() as stack:
        kinds = row_format.arrays.items()
        write = [stack.enter_context(_growing(store.folder / files[name], *kind)) for name, kind in kinds]
        for record in part.read():
            if not 0 <= record.label < (MOST_CLASSES if classes is None else classes):
                allowed = "0 or more" if classes is None else f"0..{classes - 1}"
                raise ValueError(f"'{record.name}' has label {cut(record.label)}; allowed: {allowed}")
            try:
                row = row_format.row(record)
            except BadImage as error:
                if strict:
                    remedy = "repair it, or prepare without strict to skip it"
                    raise ValueError(f"'{record.name}': {error}; {remedy}") from None
                skipped.append((record.name, str(error)))
                continue
            except ValueError as error:
                raise ValueError(f"'{record.name}' {error}") from None
            for append, array in zip(write, row, strict=False):  # a caption is no array
                append(array)
            labels.append(record.label)
            captions += [value for value in row if isinstance(value, str)]
            if row_format.values == "float":
                values = row[0].astype(np.float64)
                mean, squares = float(values.mean()), float(values.var() * values.size)
                statistics.append((values.size, mean, squares, float(np.abs(values).max())))
    if row_format.condition is not None and row_format.condition.kind == CAPTION:
        files["condition"] = f"condition-{number:05}.json"
        store.write_table(files["condition"], {"captions": captions}, indent=None)
        if (size := (store.folder / files["condition"]).stat().st_size) > MOST_LISTED:
            raise ValueError(f"'{part.name}' has captions of {size:,} bytes, more than {MOST_LISTED:,}; split it")
    files["labels"] = f"labels-{number:05}.npy"
    store.write(files["labels"], np.array(labels, np.int64))
    shard = Shard(count=len(labels), sha256={}, **files)
    shard = replace(shard, sha256={name: sha256(store.folder / name) for name in shard.files})
    facts = {
        "settings": settings,
        "shard": shard.facts(),
        "class_counts": sorted(Counter(labels).items()),
        "skipped": {"count": len(skipped), "first": skipped[:NAMED]},
        "reasons": grouped(skipped),
    }
    if statistics:
        facts["statistics"] = reduce(_merged, statistics)
    store.write_table(sidecar, facts, indent=None)
    return as_json(facts)  # the same, made now or read back


def _follow_parent() -> None:
    """Make a worker die with its parent: an orphan would go on writing below a second run's feet."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends workers silently; the parent says so
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


Make = Callable[[int, SourcePart], dict[str, Any]]  # the number and part of a shard -> its sidecar


def _in_pool(make: Make, parts: Sequence[SourcePart], workers: int) -> Iterator[dict[str, Any]]:
    # spawn: forking a process that has run torch may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(parts)), context, _follow_parent)
    try:
        for future in as_completed([pool.submit(make, number, part) for number, part in enumerate(parts)]):
            yield future.result()
    except BrokenProcessPool:
        raise OSError(
            "a worker was killed (out of memory?), or the calling script has no `if __name__ == '__main__':`; "
            "run again with fewer workers: finished shards are kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _all_shards(make: Make, parts: Sequence[SourcePart], workers: int, progress: bool) -> list[dict[str, Any]]:
    """Return every sidecar, in order."""
    stream = map(make, range(len(parts)), parts) if workers == 1 else _in_pool(make, parts, workers)
    done, images = [], 0
    with tqdm(total=len(parts), desc="prepare", unit="shard", disable=not progress) as bar:
        for facts in stream:
            done.append(facts)
            images += facts["shard"]["count"]
            bar.set_postfix_str(f"{images:,} images", refresh=False)
            bar.update()
    return sorted(done, key=lambda facts: natural(Path(facts["shard"]["images"])))


# --- the whole set ------------------------------------------------------------------------------------------------


def _printable(name: str) -> str:
    """Return the name of a class as a published model may have it: UTF-8 whatever the locale, what is none escaped."""
    with suppress(UnicodeEncodeError):
        name = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return printable(name)


def _class_names(source: DataSource, classes: int | None) -> tuple[str, ...]:
    """Return the class names, () where labels decide; `classes` must fit names, and extends numbers.

    Classes that are WordNet ids of ImageNet, all of them, have the names of these.
    """
    if classes is None or classes == len(source.classes):
        known = [IMAGENET.get(name) for name in source.classes]
        return tuple(name or "" for name in known) if all(known) else tuple(map(_printable, source.classes))
    if source.classes == numbered(len(source.classes)):
        return numbered(classes)
    raise ValueError(f"classes={classes}, but '{source.name}' names {len(source.classes)}; leave it out, or correct it")


def _summary(
    done: list[dict[str, Any]], row: RowFormat, source: DataSource, names: tuple[str, ...], out: Path
) -> Prepared:
    """Return the prepared set that the sidecars describe."""
    settings, counts, reasons = done[0]["settings"], Counter[int](), Counter(grouped(source.unread))
    statistics = [facts["statistics"] for facts in done if "statistics" in facts]
    whole = reduce(_merged, statistics) if statistics else None
    for facts in done:
        counts.update(dict(facts["class_counts"]))
        reasons.update(facts["reasons"])
    names = names or numbered(max(counts, default=-1) + 1)
    skipped = [facts["skipped"] for facts in done]
    first = [*(pair for some in skipped for pair in some["first"]), *map(list, source.unread)][:NAMED]
    return Prepared(
        folder=out,
        shape=row.shape,
        classes=names,
        class_counts=tuple(counts[label] for label in range(len(names))),
        empty_classes=tuple(name for label, name in enumerate(names) if not counts[label]),
        resize=settings["resize"],
        source={"name": source.name, "kind": source.kind},
        settings=settings,
        skipped={"count": sum(some["count"] for some in skipped) + len(source.unread), "first": first},
        shards=tuple(Shard(**facts["shard"]) for facts in done if facts["shard"]["count"]),
        reasons=most_common(reasons),
        ignored=source.ignored,
        values=row.values,
        condition=row.condition,
        statistics={} if whole is None else {"mean": whole[1], "std": sqrt(whole[2] / whole[0]), "largest": whole[3]},
    )


def _accept(prepared: Prepared, strict: bool) -> Prepared:
    """Return the set if it is good enough to be used."""
    skipped, first = prepared.skipped["count"], prepared.skipped["first"]
    example = f" (first: '{cut(first[0][0])}': {first[0][1]})" if first else ""
    if not prepared.count:
        raise ValueError(f"'{prepared.source['name']}' has no usable image; {skipped:,} were skipped{example}")
    if strict and skipped:
        raise ValueError(f"{skipped:,} images were skipped{example}; repair them, or prepare without strict")
    if strict and prepared.empty_classes:
        names = ", ".join(map(cut, prepared.empty_classes[:20]))
        raise ValueError(f"classes without images: {names}; prepare without strict")
    return prepared


def _without_empty(prepared: Prepared) -> Prepared:
    """Return the set with the labels 0, 1, ... over the classes that have images; rewrites files of labels.

    An interrupted call leaves labels that their sidecars contradict, and the next one makes these shards again.
    """
    nonempty = [label for label, count in enumerate(prepared.class_counts) if count]
    if len(nonempty) == len(prepared.classes):
        return prepared
    shards = []
    for shard in prepared.shards:
        path = prepared.folder / shard.labels
        prepared.store.write(shard.labels, np.searchsorted(nonempty, np.load(path)).astype(np.int64))
        shards.append(replace(shard, sha256=shard.sha256 | {shard.labels: sha256(path)}))
    return replace(
        prepared,
        shards=tuple(shards),
        classes=tuple(prepared.classes[label] for label in nonempty),
        class_counts=tuple(prepared.class_counts[label] for label in nonempty),
    )


def prepare(
    source_path: Path | str,
    out: Path | str,
    *,
    size: Size | None = None,
    resize: str = "auto",
    channels: int | None = None,
    values: str = "",
    condition: str = "",
    split: str = "",
    workers: int | None = None,
    strict: bool = False,
    classes: int | None = None,
    progress: bool = True,
    part_size: int = PART_SIZE,
) -> Prepared:
    """Return the set prepared from source_path (see open_source) in the folder `out`, made now or before.

    An interrupted call, made again, keeps finished shards and ends with the very bytes of one that was not.
    size: of pictures, (height, width) or the side of a square; without one the rows of an array (N, C, *space) are
    kept as they are: values uint8 or float, by default as their type says, floats as float32.
    resize: auto (box up to 64 pixels, centre-crop above), box, centre-crop, none. channels: 3, or 1 for grey.
    condition: what samples are conditioned on beside their labels: "vector:KEY", "tokens:KEY" or "tokens:KEY,MASK",
    "image:KEY", "caption:KEY"; KEY names an array of an .npz (KEY.npy beside an .npy), a column of parquet, or the
    suffix of captions in a webdataset. NaN and Inf are refused.
    workers: processes, by default one per CPU. classes: how many there must be. part_size: most images in a shard.
    Pictures that cannot be read are skipped and named in the index, as are class folders without images, which are
    no classes unless `classes` counts them; strict makes both errors.
    """
    source_path, out = Path(source_path), Path(out)
    for option, value in {"workers": workers, "classes": classes}.items():
        at_least(option, 1 if value is None else value, 1)
    for side in () if size is None else sides(size):
        at_least("size", side, 1)
    if size is not None and channels not in (None, *MODES):
        raise ValueError(f"channels={channels} is not supported; allowed: {', '.join(map(str, MODES))}")
    if out.resolve().is_relative_to(source_path.resolve()):
        raise ValueError(f"out='{out}' lies in the source; choose a folder elsewhere")
    keys = ConditionKeys.parse(condition) if condition else None
    source = open_source(source_path, split, part_size, keys, as_arrays=size is None)
    if strict and source.unread:  # before hours of work
        name, reason = source.unread[0]
        raise ValueError(f"'{cut(name)}': {reason}; or prepare without strict to skip it")
    names = _class_names(source, classes)
    row = row_format(source, size, resize, channels, values, keys)
    options = {"size": size, "resize": row.resize, "channels": row.shape[0], "split": split, "classes": classes}
    options |= {"values": row.values} if size is None else {}
    options |= {"condition": condition} if condition else {}
    contents = stamp_of([(part.name, part.stamp) for part in source.parts], source.classes)
    # what makes two preparations the same, as JSON keeps it
    settings = {**options, "part_size": part_size, "source": source.name, "kind": source.kind, "contents": contents}
    store = ArrayStore(
        out, "images", "delete this file, and its shard is made again", "choose another --out, or delete the folder"
    )
    with store.lock():
        store.require_own(rf"{_OURS}|\..*", "choose another --out")
        for sidecar in sorted(out.glob("shard-*.json")):
            store.require_same(_read_sidecar(store, sidecar.name)["settings"], settings)
        if (out / INDEX).is_file():  # an earlier call has finished here
            prepared = open_prepared(out)
            store.require_same(prepared.settings, settings)
            if NO_HEIF in prepared.reasons and has_heif():
                lacks = f"lacks {prepared.reasons[NO_HEIF]:,} HEIC pictures, which can be read now"
                raise ValueError(f"out='{out}' was prepared without pillow-heif and {lacks}; {store.other}")
        else:
            make = partial(_shard, store, settings, row, len(names) or None, strict)
            done = _all_shards(make, source.parts, workers or os.cpu_count() or 1, progress)
            prepared = _accept(_summary(done, row, source, names, out), strict)
            if source.by_folder and classes is None:
                prepared = _without_empty(prepared)
            left = {"folder"} if prepared.format > 1 else {"folder", "values", "condition", "statistics"}
            facts = {name: value for name, value in asdict(prepared).items() if name not in left}
            facts |= {"shards": [shard.facts() for shard in prepared.shards]}
            store.write_table(INDEX, {"format": prepared.format, "count": prepared.count, **facts}, indent=1)
        # what is not part of the finished set goes: sidecars, empty shards, what a killed run left
        finished = {INDEX, *(name for shard in prepared.shards for name in shard.sha256)}
        for entry in sorted(out.iterdir()):
            if re.fullmatch(_OURS, entry.name) and entry.name not in finished:
                entry.unlink()
        recover_all(out)
    return _accept(prepared, strict)


def left_out(prepared: Prepared, named: int = LISTED) -> list[str]:
    """Return lines on what of the source is not in the set, with at most `named` names of a kind."""
    first, count, ignored = prepared.skipped["first"], prepared.skipped["count"], prepared.ignored
    lines = [f"  {number:,} skipped: {reason}" for reason, number in prepared.reasons.items()]
    lines += [f"  {name}: {reason}" for name, reason in first[:named]]
    lines += [f"  ... and {count - named:,} more"] if count > named else []
    if ignored:
        kinds = ", ".join(f"{suffix} {number:,}" for suffix, number in ignored.items())
        total = sum(ignored.values())
        what = "file that is no image" if total == 1 else "files that are no images"
        lines.append(f"  ignored {total:,} {what}: {kinds}")
    for name in prepared.empty_classes[:named]:
        lines.append(f"  no images of class {name}" + ("" if name in prepared.classes else ": it is left out"))
    more = len(prepared.empty_classes) - named
    lines += [f"  ... and {more:,} more classes without images"] if more > 0 else []
    return list(map(printable, lines))


def describe(folder: Path | str) -> tuple[str, bool]:
    """Return a table of what a prepared folder holds, and whether its checksums are good; reads every byte."""
    prepared, checksums = open_prepared(folder), GOOD
    counts = prepared.class_counts
    try:
        prepared.verify()
    except ValueError as error:
        checksums = str(error)
    names = [name for shard in prepared.shards for name in shard.sha256]
    condition, floats = prepared.condition, prepared.statistics
    spread = f", standard deviation {floats['std']:.4g}, largest {floats['largest']:.4g}" if floats else ""
    rows = {
        "shape": "x".join(map(str, prepared.shape)),
        **({"values": f"{prepared.values}{spread}"} if prepared.format > 1 else {}),
        **({"condition": str(condition)} if condition is not None else {}),
        "images": f"{prepared.count:,} in {len(prepared.shards):,} shards",
        "bytes": f"{sum((prepared.folder / name).stat().st_size for name in names):,}",
        "resize": prepared.resize,
        "source": f"{prepared.source['name']} ({prepared.source['kind']})",
        "skipped": f"{prepared.skipped['count']:,}",
        "checksums": checksums,
        "classes": f"{len(prepared.classes):,}, {counts.count(0):,} of them empty",
    }
    lines = [f"{key:<10} {value}" for key, value in rows.items()]
    lines.append(f"images per class: min {min(counts):,}, median {median(counts):,g}, max {max(counts):,}")
    classes = [f"  {count:>12,}  {name}" for name, count in zip(prepared.classes, counts, strict=True)]
    lines += classes[:LISTED]
    lines += [f"  ... and {len(classes) - LISTED:,} more"] if len(classes) > LISTED else []
    return "\n".join([*map(printable, lines), *left_out(prepared)]), checksums == GOOD
