"""A network of the user's on data of the user's, as a recipe of the one loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mvm.network import ConditionConfig, Own, OwnConfig
from mvm.network.config import OWN_CONDITION
from mvm.network.own import adapted
from mvm.options import nearest
from mvm.path.schedule import SCHEDULES, schedule_named
from mvm.recipes import OWN_DATA, AnyRecipe, DataConfig, Recipe, changed, load_recipe, located, require_field_recipe
from mvm.recipes import options as options_of
from mvm.recipes.docs import meant
from mvm.training.dataset import Samples, open_samples
from mvm.wrapped import NetworkField, wrap

SHORT = ("objective", "engine", "train")  # tables whose options need no table in their name; the last wins (keep)
WORDS = {"drop": "objective.label_drop", "timesteps": "path.law.name"}  # as mvm.loss has them


def dotted(given: Mapping[str, Any], recipe: AnyRecipe) -> dict[str, Any]:
    """Return options of a call by their dotted names: lr is train.lr, preview_every is preview.every."""
    known = options_of(recipe)
    names = {name.replace(".", "_"): name for name in known} | {name: name for name in known}
    for table in SHORT:
        names |= {name.removeprefix(f"{table}."): name for name in known if name.startswith(f"{table}.")}
    names |= {word: name for word, name in WORDS.items() if name in known}
    for word in given:
        if word not in names:
            meanings = [option for option, _ in meant(word, known) if option in known]
            short = [min((name for name, option in names.items() if option == each), key=len) for each in meanings]
            hint = f" (did you mean {' or '.join(map(repr, short))}?)" if short else nearest(word, names)
            raise ValueError(f"unknown option '{word}'{hint}; options are those of recipes: mvm options")
    values = {names[word]: value for word, value in given.items()}
    if len(values) < len(given):
        raise ValueError(f"options {', '.join(given)}: one is given twice, by two of its names")
    return values


def own_recipe(field: NetworkField, samples: Samples, base: Recipe, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe that records a training of an own network on own data; given: options by dotted name."""
    network, x0, condition = field.network, samples.first.x0, samples.first.condition
    name = type(network.network).__name__
    free = ("data.values", "data.classes", "data.names", "codec.scale")
    for option in given:
        if option.startswith(("data.", "network.", "codec.", "condition.")) and option not in free:
            raise ValueError(f"{option} belongs to a recipe; here network and dataset say what it would")
    null, is_tensor = network.null, isinstance(condition, torch.Tensor)
    labelled = is_tensor and condition.shape == (1,) and not condition.is_floating_point()
    names = tuple(given.get("data.names", samples.classes))
    classes = given.get("data.classes", len(names) or (null if isinstance(null, int) else 0)) if labelled else 0
    values = given.get("data.values", "uint8" if x0.dtype == torch.uint8 else "float")
    if values == "float" and x0.dtype == torch.uint8:
        raise ValueError("data.values='float': the dataset holds uint8; leave it out, or give floats")
    if values == "uint8" and x0.is_floating_point() and (largest := float(x0.abs().max())) > 1.001:
        raise ValueError(f"data.values='uint8' takes float images in [-1, 1]; a value of x0 is {largest:.3g}")
    data = DataConfig(OWN_DATA, channels=x0.shape[1], space=tuple(x0.shape[2:]), values=values)
    if condition is None and null is not None:
        raise ValueError("null is given to mvm.wrap, and the dataset gives no condition that it could stand for")
    drop = given.get("objective.label_drop")
    if drop is not None and condition is None:
        raise ValueError(f"objective.label_drop={drop}: the dataset gives no condition to drop; leave it out")
    if drop and null is None:
        raise ValueError(
            f"objective.label_drop={drop} puts the null condition in a condition's place, and there is none; give it: "
            "mvm.wrap(network, null=...)"
        )
    # without a condition the model is unconditional; without a null nothing can be dropped
    usual = 1.0 if condition is None else 0.0 if null is None else base.objective.label_drop
    kind = "none" if condition is None else "labels" if labelled and classes else OWN_CONDITION
    return changed(
        base,
        {
            "name": name,
            "data": {**vars(data), "classes": classes, "names": names},
            "condition": vars(ConditionConfig(kind)),
            "network": vars(OwnConfig(name=name, time=network.time_words, null=network.null_words)),
            "objective.label_drop": usual,
            "objective.kind": field.kind,
            **_schedule(field),
            **{name: value for name, value in given.items() if name not in free or name == "codec.scale"},
        },
    )


def _schedule(field: NetworkField) -> dict[str, Any]:
    """Return the options that name a network's path."""
    T = getattr(field.schedule, "T", 1.0)
    for name, kind in SCHEDULES.items():
        if type(field.schedule) is kind and field.schedule == schedule_named(name, T):
            return {"path.schedule": name, "path.T": T}
    raise ValueError(f"network: no recipe can name path={field.schedule} of mvm.wrap; use {', '.join(SCHEDULES)}")


def own_training(
    network: Any, dataset: Any, base: AnyRecipe | str | Path | None, batches: bool | None, options: Mapping[str, Any]
) -> tuple[Recipe, Own, Samples]:
    """Return recipe, network and samples of a call of mvm.train; base: the recipe whose options are the defaults."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"network is of type {type(network).__name__}; give a torch module, or a recipe")
    if dataset is None:
        raise ValueError("dataset is missing: mvm.train(network, dataset)")
    known = load_recipe(str(base)) if isinstance(base, str | Path) else base or Recipe()
    given = dotted(options, known)
    field = own_field(network, require_field_recipe(known, f"recipe={base}"), given)
    parameters = [value for value in field.parameters() if value.is_floating_point()]
    if not parameters:
        raise ValueError(f"network ({type(field.network.network).__name__}) has no parameters; give a torch module")
    dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    samples = open_samples(dataset, dtype, batches)
    if isinstance(dataset, DataLoader) and dataset.batch_size and base is None:
        given.setdefault("train.batch", dataset.batch_size)
    return located(own_recipe(field, samples, require_field_recipe(known, ""), given)), field.network, samples


def own_field(network: nn.Module, base: Recipe, given: Mapping[str, Any]) -> NetworkField:
    """Return the network as mvm.wrap does; options on kind and path are for one that is not wrapped."""
    if isinstance(network, NetworkField):
        for name in ("objective.kind", "path.schedule", "path.T"):
            if name in given:
                raise ValueError(f"{name} is that of mvm.wrap's call; leave it out here")
        return network
    own = adapted(network)
    path = schedule_named(given.get("path.schedule", base.path.schedule), given.get("path.T", base.path.T))
    return wrap(network, kind=given.get("objective.kind", base.objective.kind), path=path, null=own.null, time=own.time)
