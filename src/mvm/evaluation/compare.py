"""Two models on the same seeds and labels: figures of both, and their difference with an interval."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvm.evaluation.evaluate import Reference, Side, check_shapes, look, sampling_notes, software
from mvm.evaluation.gather import Judge, block_of
from mvm.evaluation.images import ImageSet
from mvm.evaluation.measures import Figure, Gathered, figures
from mvm.evaluation.metrics import jackknife_error
from mvm.evaluation.moments import Accumulator
from mvm.files import write_text
from mvm.options import at_least

NORMAL_95 = 1.96


class Difference(NamedTuple):
    """A figure of A, of B, and B - A with its standard error and 95 % interval, images left out pair by pair."""

    name: str
    a: float
    b: float
    difference: float
    error: float
    low: float
    high: float

    @property
    def told(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def _without(found: Gathered, block: int, dealt: Tensor) -> Gathered:
    """Return the features without one block."""
    rest = Gathered(count=int((dealt != block).sum()))
    for key, blocks in found.blocks.items():
        total = Accumulator(len(blocks[0].mean), blocks[0].mean.device)
        for part in (part for number, part in enumerate(blocks) if number != block):
            total.merge(part)
        rest.blocks[key] = [total]
    rest.features = {key: values[(dealt != block).to(values.device)] for key, values in found.features.items()}
    return rest


def _whole(found: Gathered) -> Gathered:
    """Return the features with their blocks put together."""
    return Gathered(found.count, {}, {key: found.moments(key) for key in found.blocks}, found.features)


class Comparison(NamedTuple):
    """The differences, and everything that made them."""

    differences: list[Difference]
    facts: dict[str, Any]


def compare(judge: Judge, a: ImageSet, b: ImageSet, reference: Side, names: Sequence[str]) -> Comparison:
    """Return the figures of two sets of images whose i-th images belong together, and their differences.

    The error is a jackknife's: block after block of pairs is left out of both sets, so that what both owe to the same
    seeds and labels cancels. The reference is taken as known.
    """
    at_least("blocks", judge.blocks, 2)
    check_shapes(a.facts, b.facts)
    target = Reference(judge, reference, names)
    check_shapes(a.facts, target.facts)
    sides = {role: look(judge, Side(role, images), names) for role, images in (("A", a), ("B", b))}
    (first, told_a), (second, told_b) = sides.values()
    if first.count != second.count:
        raise ValueError(f"there are {first.count} and {second.count} images; pairs are needed")
    facts = {
        "a": told_a,
        "b": told_b,
        "reference": target.facts,
        "networks": judge.facts(names),
        "blocks": judge.blocks,
        "warnings": sampling_notes(names, {**sides, "reference": (target.gathered, target.facts)}),
        "software": software(judge.place.device),
    }
    return Comparison(_differences(judge, (first, second), target.gathered, names), facts)


def _differences(
    judge: Judge, sides: tuple[Gathered, Gathered], target: Gathered, names: Sequence[str]
) -> list[Difference]:
    dealt = block_of(torch.arange(sides[0].count), judge.blocks)
    whole = [figures(names, _whole(side), target, judge.kid_size) for side in sides]
    left_out = [
        [figures(names, _without(side, block, dealt), target, judge.kid_size) for side in sides]
        for block in range(judge.blocks)
    ]
    sizes = [int((dealt == block).sum()) for block in range(judge.blocks)]
    return [_difference(name, whole, left_out, sizes) for name in names]


def _gap(name: str, pair: Sequence[dict[str, Figure]]) -> float:
    return pair[1][name].value - pair[0][name].value


def _difference(
    name: str,
    whole: Sequence[dict[str, Figure]],
    left_out: Sequence[Sequence[dict[str, Figure]]],
    sizes: Sequence[int],
) -> Difference:
    gap = _gap(name, whole)
    error = jackknife_error(gap, [_gap(name, pair) for pair in left_out], sizes).error
    a, b = (figure[name].value for figure in whole)
    return Difference(name, a, b, gap, error, gap - NORMAL_95 * error, gap + NORMAL_95 * error)


def as_table(found: Sequence[Difference]) -> str:
    """Return the differences as a Markdown table; one whose interval holds zero is not told apart."""
    lines = ["| figure | A | B | B - A | 95 % interval | |", "|---|---|---|---|---|---|"]
    for row in found:
        verdict = "differs" if row.told else "not told apart"
        cells = (f"{row.a:.5g}", f"{row.b:.5g}", f"{row.difference:+.3g}", f"{row.low:+.3g} to {row.high:+.3g}")
        lines.append(f"| {row.name} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def write(path: Path, found: Comparison) -> None:
    """Write the differences and what made them as JSON."""
    rows = [{**row._asdict(), "differs": row.told} for row in found.differences]
    write_text(path, json.dumps({"differences": rows, **found.facts}, indent=2) + "\n")
