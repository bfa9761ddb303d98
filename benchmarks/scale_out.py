"""The tables of docs/how-to/many-gpus.md: what mvm.recipes.estimate computes for some recipes on many GPUs.

    python benchmarks/scale_out.py

A test compares them with the page.
"""

from collections.abc import Sequence

from mvm.recipes import Recipe, load_recipe, require_field_recipe
from mvm.recipes.estimate import best_estimate, estimate, where_sums_dominate, with_batch
from mvm.recipes.page import newton_schulz_shares, training_flops

SHOWN = ("imagenet32-dit-b", "imagenet32-dit-l", "imagenet256-ddt-xl")
GPUS = (1, 8, 64, 256, 1024)
LARGER_BATCH, LARGER_GPUS = 16384, (64, 256, 1024)


def scaling_table() -> str:
    """Return the estimates of the recipes as they are."""
    return _table([(shown_recipe(name), gpus) for name in SHOWN for gpus in GPUS])


def larger_batch_table() -> str:
    """Return the estimates of the recipes with LARGER_BATCH."""
    return _table([(with_batch(shown_recipe(name), LARGER_BATCH), gpus) for name in SHOWN for gpus in LARGER_GPUS])


def dominance_table() -> str:
    """Return from how many GPUs on sums take half of a step."""
    lines = ["| recipe | `train.batch` | GPUs, worst case | GPUs, best case |", "|---|---|---|---|"]
    for name in SHOWN:
        recipe = shown_recipe(name)
        for batch in (recipe.train.batch, LARGER_BATCH):
            found = (where_sums_dominate(with_batch(recipe, batch), how) for how in (estimate, best_estimate))
            lines.append(
                f"| `{name}` | {batch:,} | " + " | ".join(f"{gpus:,}" if gpus else "never" for gpus in found) + " |"
            )
    return "\n".join(lines)


def muon_table() -> str:
    """Return the work of a step with Muon on a GPU."""
    lines = [
        "| recipe | GPUs | Newton-Schulz of a step, TFLOP | of it the most on one GPU | images of one GPU, TFLOP |",
        "|" + "---|" * 5,
    ]
    recipe = shown_recipe("imagenet256-ddt-xl")
    for gpus in GPUS[:3]:
        shares = newton_schulz_shares(recipe, gpus)
        images = training_flops(recipe) * recipe.train.batch / gpus
        sizes = " | ".join(f"{flops / 1e12:,.4g}" for flops in (sum(shares), max(shares), images))
        lines.append(f"| `{recipe.name}` | {gpus} | {sizes} |")
    return "\n".join(lines)


def shown_recipe(name: str) -> Recipe:
    """Return a shipped recipe for a field."""
    return require_field_recipe(load_recipe(name), name)


def _table(rows: Sequence[tuple[Recipe, int]]) -> str:
    lines = [
        "| recipe | GPUs | images a GPU | compute, ms | sums, ms: worst | best | efficiency: worst | best "
        "| hours: worst | best |",
        "|" + "---|" * 10,
    ]
    return "\n".join([*lines, *(_row(recipe, gpus) for recipe, gpus in rows)])


def _row(recipe: Recipe, gpus: int) -> str:
    worst, best = estimate(recipe, gpus), best_estimate(recipe, gpus)
    sums = f"{1000 * worst.communication:.1f} | {1000 * best.communication:.1f}"
    shares = f"{worst.efficiency:.0%} | {best.efficiency:.0%} | {worst.hours:.2g} | {best.hours:.2g}"
    return f"| `{recipe.name}` | {gpus:,} | {worst.images:,.0f} | {1000 * worst.compute:,.1f} | {sums} | {shares} |"


if __name__ == "__main__":
    print("\n\n".join((scaling_table(), larger_batch_table(), dominance_table(), muon_table())))
