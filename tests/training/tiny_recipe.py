"""The digits recipe made so small that a test trains it in a second."""

from mvm.recipes import Recipe, load_recipe, override

NETWORK = {"network.depth": "1", "network.heads": "2", "network.width": "16", "network.patch": "4"}


def recipe_with(options: dict[str, str], **changes: str) -> Recipe:
    """Return the digits recipe with these options, and then the changes: train_lr="1" changes train.lr."""
    dotted = {name.replace("_", ".", 1): value for name, value in changes.items()}
    return override(load_recipe("digits"), {**options, **dotted})
