"""Weights of another model, fitted to a recipe's network: what depends on the data is made anew where it differs."""

import torch

from mvm.checkpoint import Weights
from mvm.network import AUGMENT_MAP, build_network
from mvm.published import Opened
from mvm.recipes import Recipe, options, require_field_recipe

TAKER = "label."  # begins the names of what takes the condition, of any kind
LABELS = f"{TAKER}weight"  # (classes + 1, width); the last row is the null class
# The weights mean something else where these differ. Training goes on, but must learn that first.
MEANING = ("path.schedule", "path.T", "objective.kind", "codec.kind", "codec.scale", "network.time")


def fit(own: Weights, recipe: Recipe, opened: Opened) -> tuple[Weights, list[str]]:
    """Return weights for the recipe's network, from another model's where they fit, and what to say of them.

    own: the network's weights at initialisation. Another number of classes, of channels or another patch changes the
    shapes of some tensors, which start as in `own`; a new class starts as the null class. So does what takes another
    kind or size of condition. Any other difference between the networks is an error. The number of an image's tokens
    changes no shape: their positions are not learned.
    """
    given = {name: value.float() for name, value in opened.weights.items()}
    flexible, free = _shaped_by_data(recipe), {AUGMENT_MAP}
    if recipe.condition != require_field_recipe(opened.recipe, opened.origin["run"]).condition:
        takers = {name for name in own.keys() | given.keys() if name.startswith(TAKER)}
        given = {name: value for name, value in given.items() if name not in takers}
        free |= takers
    wrong = sorted((own.keys() ^ given.keys()) - free)
    wrong += [n for n in own if n in given and own[n].shape != given[n].shape and n not in flexible]
    if wrong:
        raise _other_network(recipe, opened, wrong)
    taken = {n: given[n] for n in own if n in given and own[n].shape == given[n].shape}
    fitted, anew = {**own, **taken}, [n for n in own if n not in taken and n != AUGMENT_MAP]
    names, before = recipe.data.class_names, opened.classes
    bare = all(map(str.isdigit, names)) or all(map(str.isdigit, before))  # numbers name nothing
    if LABELS in given and (LABELS not in taken or (names != before and not bare)):
        taken.pop(LABELS, None)
        kept = [] if bare else [name for name in names if name in before]
        table = given[LABELS][-1].repeat(len(names) + 1, 1)  # every class as the null class
        for name in kept:
            table[names.index(name)] = given[LABELS][before.index(name)]
        fitted[LABELS], anew = table, [name for name in anew if name != LABELS]
        shown = ["the null class", *kept[:10], *(["..."] if len(kept) > 10 else [])]
        anew.append(f"{LABELS} for {len(names)} classes (kept: {', '.join(shown)})")
    lines = [f"took {len(taken)} of {len(own)} tensors, step {opened.origin['step']} of {opened.origin['run']}"]
    if anew:
        lines.append(f"made anew: {', '.join(anew)}")
    was, now = options(opened.recipe), options(recipe)
    other = [f"{name} {was[name]} there, {now[name]} now" for name in MEANING if was[name] != now[name]]
    if other:
        lines.append(f"warning: what the network reads or predicts differs: {'; '.join(other)}")
    return fitted, lines


def _shaped_by_data(recipe: Recipe) -> set[str]:
    """Return the names of the parameters whose shape depends on channels or classes."""
    network, (channels, *space), classes, augment_size, condition = recipe.blueprint
    with torch.device("meta"):
        one = build_network(network, (channels, *space), classes, augment_size, condition)
        other = build_network(network, (channels + 1, *space), classes + 1, augment_size, condition)
    shapes = {name: value.shape for name, value in other.named_parameters()}
    return {name for name, value in one.named_parameters() if shapes[name] != value.shape}


def _other_network(recipe: Recipe, opened: Opened, names: list[str]) -> ValueError:
    before, now = options(require_field_recipe(opened.recipe, opened.origin["run"]).network), options(recipe.network)
    for values, source in ((before, opened.recipe), (now, recipe)):  # 0 stands for what the size says
        values |= dict(
            zip(("depth", "width", "heads"), require_field_recipe(source, "").network.dimensions, strict=True)
        )
    free = ("size", "patch", "dropout")  # the first is in those three, the others change no shape that matters
    other = [f"--network.{n} {value}" for n, value in before.items() if now.get(n) != value and n not in free]
    remedy = f"give the recipe its network: {' '.join(other)}" if other else "train with the recipe it was made by"
    return ValueError(
        f"--init-from: {', '.join(names[:3])} of '{opened.origin['run']}' (recipe {opened.recipe.name}) do not fit the "
        f"recipe's network; {remedy}"
    )
