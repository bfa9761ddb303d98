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
from mvm.files import write_text
from mvm.metrics.distances import LeaveOneOut, kernel_leave_one_out, paired_difference, student_95
from mvm.metrics.measures import MEASURES, Gathered, figures, is_kernel
from mvm.metrics.moments import Accumulator
from mvm.options import at_least


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
    def significant(self) -> bool:
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
    seeds and labels cancels. The reference is taken as known. Kernel distances are of all images, not of subsets.
    """
    at_least("blocks", judge.blocks, 2)
    check_shapes(a.facts, b.facts)
    target = Reference(judge, reference, names)
    check_shapes(a.facts, target.facts)
    sides = {role: look(judge, Side(role, images), names) for role, images in (("A", a), ("B", b))}
    (first, facts_a), (second, facts_b) = sides.values()
    if first.count != second.count:
        raise ValueError(f"there are {first.count} and {second.count} images; pairs are needed")
    facts = {
        "a": facts_a,
        "b": facts_b,
        "reference": target.facts,
        "networks": judge.facts(names),
        "blocks": judge.blocks,
        "warnings": sampling_notes(names, {**sides, "reference": (target.gathered, target.facts)}),
        "software": software(judge.place.device),
    }
    dealt = block_of(torch.arange(first.count), judge.blocks)
    sizes = [int((dealt == block).sum()) for block in range(judge.blocks)]
    one, other = (_leaving(side, target.gathered, names, dealt, judge.blocks) for side in (first, second))
    return Comparison([_difference(name, one[name], other[name], sizes) for name in names], facts)


def _leaving(
    side: Gathered, target: Gathered, names: Sequence[str], dealt: Tensor, blocks: int
) -> dict[str, LeaveOneOut]:
    """Return every figure of a side, and without each of its blocks."""
    found = {}
    for name in filter(is_kernel, names):
        key = MEASURES[name].key
        found[name] = kernel_leave_one_out(side.features[key], target.features[key], dealt)
    rest = [name for name in names if name not in found]
    if rest:
        whole = figures(rest, _whole(side), target)
        parts = [figures(rest, _without(side, block, dealt), target) for block in range(blocks)]
        found |= {name: LeaveOneOut(whole[name].value, [part[name].value for part in parts]) for name in rest}
    return found


def _difference(name: str, a: LeaveOneOut, b: LeaveOneOut, sizes: Sequence[int]) -> Difference:
    found = paired_difference(a, b, sizes)
    gap, reach = found.value, student_95(len(sizes)) * found.error
    return Difference(name, a.value, b.value, gap, found.error, gap - reach, gap + reach)


def as_table(found: Sequence[Difference]) -> str:
    """Return the differences as a Markdown table; with whether the interval leaves zero out."""
    lines = ["| figure | A | B | B - A | 95 % interval | |", "|---|---|---|---|---|---|"]
    for row in found:
        verdict = "differs" if row.significant else "no significant difference"
        cells = (f"{row.a:.5g}", f"{row.b:.5g}", f"{row.difference:+.3g}", f"{row.low:+.3g} to {row.high:+.3g}")
        lines.append(f"| {row.name} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def write(path: Path, found: Comparison) -> None:
    """Write the differences and what made them as JSON."""
    rows = [{**row._asdict(), "differs": row.significant} for row in found.differences]
    write_text(path, json.dumps({"differences": rows, **found.facts}, indent=2) + "\n")
