"""Turn any source into shards of equal images: in parallel, restartable, each file whole or absent."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mvm import files
from mvm.data.resize import MODES, NO_HEIF, has_heif, resolve
from mvm.data.shards import INDEX, Prepared, Shard, index_of, open_prepared
from mvm.data.sources import open_source
from mvm.data.sources.records import PART_SIZE, Source, most_common, numbered, stamp_of
from mvm.data.workers import NAMED, Task, all_shards, grouped, landing, read_sidecar
from mvm.options import at_least
from mvm.untrusted import cut, printable

_OURS = re.compile(r"(images|labels)-\d{5,}\.npy|shard-\d{5,}\.json|index\.json|\..*\.tmp\.\w+")


def _check_settings(out: Path, found: dict[str, Any], settings: dict[str, Any]) -> None:
    other = [key for key in settings if found.get(key) != settings[key]]
    if other:
        changes = ", ".join(f"{key} {cut(found.get(key))} there, {settings[key]} now" for key in other)
        raise ValueError(f"out='{out}' was prepared otherwise ({changes}); choose another --out, or delete the folder")


def _check_out(out: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder with anything that this very preparation would not have written."""
    for entry in sorted(out.iterdir()):
        if not _OURS.fullmatch(entry.name):
            raise ValueError(f"out='{out}' holds other things (first: {entry.name}); choose a new or empty folder")
        if entry.name.startswith("shard-"):
            _check_settings(out, read_sidecar(entry)["settings"], settings)


def _class_names(source: Source, classes: int | None) -> tuple[str, ...]:
    """Return the names of the classes, () when the labels will tell; `classes` must fit names, and extends numbers."""
    bare = source.classes == numbered(len(source.classes))
    if classes is None or classes == len(source.classes):
        return source.classes
    if bare:
        return numbered(classes)
    raise ValueError(f"classes={classes}, but '{source.name}' names {len(source.classes)}; leave it out, or correct it")


def _total(done: list[dict[str, Any]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for told in done:
        total.update(dict(told["class_counts"]))
    return total


def _summary(done: list[dict[str, Any]], source: Source, names: tuple[str, ...], out: Path) -> Prepared:
    """Return the prepared set that the sidecars describe."""
    counts, settings = _total(done), done[0]["settings"]
    names = names or numbered(max(counts, default=-1) + 1)
    skipped = [told["skipped"] for told in done]
    first = [*(pair for some in skipped for pair in some["first"]), *map(list, source.unread)][:NAMED]
    reasons: Counter[str] = Counter(grouped(source.unread))
    for told in done:
        reasons.update(told["reasons"])
    return Prepared(
        folder=out,
        shape=(settings["channels"], settings["size"], settings["size"]),
        classes=names,
        class_counts=tuple(counts[label] for label in range(len(names))),
        empty_classes=tuple(name for label, name in enumerate(names) if not counts[label]),
        resize=settings["resize"],
        source={"name": source.name, "kind": source.kind},
        settings=settings,
        skipped={"count": sum(some["count"] for some in skipped) + len(source.unread), "first": first},
        shards=tuple(Shard(**told["shard"]) for told in done if told["shard"]["count"]),
        reasons=most_common(reasons),
        ignored=source.ignored,
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
    kept = [label for label, count in enumerate(prepared.class_counts) if count]
    if len(kept) == len(prepared.classes):
        return prepared
    shards = []
    for shard in prepared.shards:
        path = prepared.folder / shard.labels
        with landing(path) as file:
            np.lib.format.write_array(file, np.searchsorted(kept, np.load(path)).astype(np.int64), allow_pickle=False)
        shards.append(replace(shard, sha256=shard.sha256 | {shard.labels: files.sha256(path)}))
    return replace(
        prepared,
        shards=tuple(shards),
        classes=tuple(prepared.classes[label] for label in kept),
        class_counts=tuple(prepared.class_counts[label] for label in kept),
    )


def _sweep(prepared: Prepared) -> None:
    """Remove what is not part of the finished set: sidecars, empty shards, what a killed run left."""
    kept = {INDEX, *(name for shard in prepared.shards for name in shard.sha256)}
    for entry in sorted(prepared.folder.iterdir()):
        if entry.name not in kept:
            entry.unlink()


def _settings(source: Source, **options: object) -> dict[str, Any]:
    """Return what makes two preparations the same, as JSON keeps it."""
    parts = [(part.name, part.stamp) for part in source.parts]
    return {**options, "source": source.name, "kind": source.kind, "contents": stamp_of(parts, source.classes)}


def _check_options(source_path: Path, out: Path, channels: int, **at_least_one: int | None) -> None:
    for option, value in at_least_one.items():
        at_least(option, 1 if value is None else value, 1)
    if channels not in MODES:
        raise ValueError(f"channels={channels} is not supported; allowed: {', '.join(map(str, MODES))}")
    if out.resolve().is_relative_to(source_path.resolve()):
        raise ValueError(f"out='{out}' lies in the source; choose a folder elsewhere")


def _again(out: Path, settings: dict[str, Any]) -> Prepared | None:
    """Return the set that an earlier call has finished here."""
    if not (out / INDEX).is_file():
        return None
    prepared = open_prepared(out)
    _check_settings(out, prepared.settings, settings)
    if NO_HEIF in prepared.reasons and has_heif():
        raise ValueError(
            f"out='{out}' was prepared without pillow-heif and lacks {prepared.reasons[NO_HEIF]:,} HEIC pictures, "
            "which can be read now; choose another --out, or delete the folder"
        )
    return prepared


def prepare(
    source_path: Path | str,
    out: Path | str,
    *,
    size: int,
    resize: str = "auto",
    channels: int = 3,
    split: str = "",
    workers: int | None = None,
    strict: bool = False,
    classes: int | None = None,
    progress: bool = True,
    part_size: int = PART_SIZE,
) -> Prepared:
    """Return the set prepared from source_path (see open_source) in the folder `out`, made now or before.

    An interrupted call, made again, keeps finished shards and ends with the very bytes of one that was not.
    resize: auto (box up to 64 pixels, centre-crop above), box, centre-crop, none. channels: 3, or 1 for grey.
    workers: processes, by default one per CPU. classes: how many there must be. part_size: most images in a shard.
    Pictures that cannot be read are skipped and named in the index, as are class folders without images, which are
    no classes unless `classes` counts them; strict makes both errors.
    """
    source_path, out = Path(source_path), Path(out)
    _check_options(source_path, out, channels, size=size, workers=workers, classes=classes)
    options = {"size": size, "resize": resolve(resize, size), "channels": channels, "split": split, "classes": classes}
    source = open_source(source_path, split, part_size)
    if strict and source.unread:  # before hours of work
        name, reason = source.unread[0]
        raise ValueError(f"'{cut(name)}': {reason}; or prepare without strict to skip it")
    settings, names = _settings(source, **options, part_size=part_size), _class_names(source, classes)
    task = partial(Task, out=out, settings=settings, classes=len(names) or None, strict=strict)
    out.mkdir(parents=True, exist_ok=True)
    with files.locked(out, f"out='{out}' is being prepared by another process; wait, or choose another"):
        _check_out(out, settings)
        prepared = _again(out, settings)
        if prepared is None:
            tasks = [task(part, number) for number, part in enumerate(source.parts)]
            done = all_shards(tasks, workers or os.cpu_count() or 1, progress)
            prepared = _accept(_summary(done, source, names, out), strict)
            if source.by_folder and classes is None:
                prepared = _without_empty(prepared)
            files.write_text(out / INDEX, json.dumps(index_of(prepared), indent=1) + "\n")
        _sweep(prepared)
    return _accept(prepared, strict)


LISTED = 20  # classes in a description


def _class_lines(prepared: Prepared) -> list[str]:
    counts = prepared.class_counts
    spread = f"images per class: min {min(counts):,}, median {median(counts):,g}, max {max(counts):,}"
    lines = [f"  {count:>12,}  {name}" for name, count in zip(prepared.classes, counts, strict=True)]
    more = [f"  ... and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else []
    return [spread, *lines[:LISTED], *more]


GOOD = "good"


def _checksums(prepared: Prepared) -> str:
    try:
        prepared.verify()
    except ValueError as error:
        return str(error)
    return GOOD


def left_out(prepared: Prepared, named: int = LISTED) -> list[str]:
    """Return lines on what of the source is not in the set, with at most `named` names of a kind."""
    first, count, ignored = prepared.skipped["first"], prepared.skipped["count"], prepared.ignored
    lines = [f"  {number:,} skipped: {reason}" for reason, number in prepared.reasons.items()]
    lines += [f"  {name}: {reason}" for name, reason in first[:named]]
    lines += [f"  ... and {count - named:,} more"] if count > named else []
    if ignored:
        kinds = ", ".join(f"{suffix} {number:,}" for suffix, number in ignored.items())
        total = sum(ignored.values())
        lines.append(
            f"  ignored {total:,} {'file that is no image' if total == 1 else 'files that are no images'}: {kinds}"
        )
    for name in prepared.empty_classes[:named]:
        lines.append(f"  no images of class {name}" + ("" if name in prepared.classes else ": it is left out"))
    more = len(prepared.empty_classes) - named
    lines += [f"  ... and {more:,} more classes without images"] if more > 0 else []
    return list(map(printable, lines))


def describe(folder: Path | str) -> tuple[str, bool]:
    """Return a table of what a prepared folder holds, and whether its checksums are good; reads every byte."""
    prepared = open_prepared(folder)
    names = [name for shard in prepared.shards for name in shard.sha256]
    rows = {
        "shape": "x".join(map(str, prepared.shape)),
        "images": f"{prepared.count:,} in {len(prepared.shards):,} shards",
        "bytes": f"{sum((prepared.folder / name).stat().st_size for name in names):,}",
        "resize": prepared.resize,
        "source": f"{prepared.source['name']} ({prepared.source['kind']})",
        "skipped": f"{prepared.skipped['count']:,}",
        "checksums": _checksums(prepared),
        "classes": f"{len(prepared.classes):,}, {prepared.class_counts.count(0):,} of them empty",
    }
    lines = [*(f"{key:<10} {value}" for key, value in rows.items()), *_class_lines(prepared)]
    return "\n".join([*map(printable, lines), *left_out(prepared)]), rows["checksums"] == GOOD
