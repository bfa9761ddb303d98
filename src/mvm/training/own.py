"""The front of training, `train`: a network of the user's on data of the user's, or a recipe, by the one loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from mvm.latent import RAE
from mvm.model import Model
from mvm.network import ConditionConfig, OwnConfig
from mvm.network.config import OWN_CONDITION
from mvm.network.own import adapted
from mvm.options import nearest
from mvm.path.schedule import SCHEDULES, schedule_named
from mvm.recipes import (
    OWN_DATA,
    AnyRecipe,
    DataConfig,
    DecoderRecipe,
    Recipe,
    changed,
    load_recipe,
    options,
    require_field_recipe,
)
from mvm.training.dataset import Samples, open_samples
from mvm.training.logs import OnLog
from mvm.training.loop import Given
from mvm.training.loop import train as train_recipe
from mvm.training.track import AUTO
from mvm.wrapped import NetworkField, wrap

SHORT = ("objective", "engine", "train")  # tables whose options need no table in their name; the last wins (keep)
WORDS = {"drop": "objective.label_drop", "timesteps": "path.law.name"}  # as mvm.loss has them


def dotted(given: Mapping[str, Any], recipe: AnyRecipe) -> dict[str, Any]:
    """Return options of a call by their dotted names: lr is train.lr, preview_every is preview.every."""
    known = options(recipe)
    names = {name.replace(".", "_"): name for name in known} | {name: name for name in known}
    for table in SHORT:
        names |= {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == table}
    names |= {word: name for word, name in WORDS.items() if name in known}
    for word in given:
        if word not in names:
            raise ValueError(
                f"unknown option '{word}'{nearest(word, names)}; options are those of recipes: mvm options"
            )
    found = {names[word]: value for word, value in given.items()}
    if len(found) < len(given):
        raise ValueError(f"options {', '.join(given)}: one is given twice, by two of its names")
    return found


def own_recipe(field: NetworkField, samples: Samples, base: Recipe, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe that records a training of an own network on own data; given: options by dotted name."""
    network, x0, condition = field.network, samples.first.x0, samples.first.condition
    own = [name for name in given if name.startswith(("data.", "network.", "codec.", "condition."))]
    free = ("data.values", "data.classes", "data.names", "codec.scale")
    if wrong := [name for name in own if name not in free]:
        raise ValueError(f"{wrong[0]} belongs to a recipe; here network and dataset say what it would")
    null, labelled = network.null, isinstance(condition, torch.Tensor) and condition.shape == (1,)
    labelled = labelled and not condition.is_floating_point()
    names = tuple(given.get("data.names", samples.classes))
    classes = given.get("data.classes", len(names) or (null if isinstance(null, int) else 0)) if labelled else 0
    values = given.get("data.values", "uint8" if x0.dtype == torch.uint8 else "float")
    if values == "float" and x0.dtype == torch.uint8:
        raise ValueError("data.values='float': the dataset holds uint8; leave it out, or give floats")
    if values == "uint8" and x0.is_floating_point() and float(x0.abs().max()) > 1.001:
        largest = float(x0.abs().max())
        raise ValueError(f"data.values='uint8' takes float images in [-1, 1]; a value of x0 is {largest:.3g}")
    data = DataConfig(OWN_DATA, channels=x0.shape[1], space=tuple(x0.shape[2:]), values=values)
    if condition is None and null is not None:
        raise ValueError("null is given to mvm.wrap, and the dataset gives no condition that it could stand for")
    drop = given.get("objective.label_drop")
    if drop is not None and not drop and condition is None:
        raise ValueError("objective.label_drop=0: the dataset gives no condition; leave it out")
    if drop and condition is None:
        raise ValueError(f"objective.label_drop={drop}: the dataset gives no condition that could be dropped")
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
            "name": type(network.network).__name__,
            "data": {**vars(data), "classes": classes, "names": names},
            "condition": vars(ConditionConfig(kind)),
            "network": vars(
                OwnConfig(name=type(network.network).__name__, time=network.time_words, null=network.null_words)
            ),
            "objective.label_drop": usual,
            "objective.kind": field.kind,
            **_schedule(field),
            **{name: value for name, value in given.items() if name not in free or name == "codec.scale"},
        },
    )


def _schedule(field: NetworkField) -> dict[str, Any]:
    """Return the options that name a network's path."""
    T = getattr(field.schedule, "T", 1.0)
    for name in SCHEDULES:
        if type(field.schedule) is SCHEDULES[name] and field.schedule == schedule_named(name, T):
            return {"path.schedule": name, "path.T": T}
    raise ValueError(f"network: no recipe can name path={field.schedule} of mvm.wrap; use {', '.join(SCHEDULES)}")


@overload
def train(network: AnyRecipe | str | Path, dataset: str | Path | None = None, **options: Any) -> Model | RAE: ...
@overload
def train(network: nn.Module, dataset: Any, run: str | Path | None = None, **options: Any) -> Model: ...
def train(
    network: nn.Module | AnyRecipe | str | Path,
    dataset: Any = None,
    run: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    batches: bool | None = None,
    resume: bool = False,
    until: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    on_log: OnLog | None = None,
    init: tuple[Path | str, str] | None = None,
    allow_change: bool = False,
    track: str = AUTO,
    **options: Any,
) -> Model | RAE:
    """Train a network on a dataset, or a recipe; return the model with its averaged weights.

        field = mvm.train(network, dataset, steps=1000, batch=256)         # nothing is kept
        field = mvm.train(network, dataset, "runs/mine", lr=3e-4, ema=0.999, preview_every=500)
        model = mvm.train("digits", "runs/digits")                         # as `mvm train digits`

    network: a torch module (x, t, condition) or (x, t), trained in place; or what mvm.wrap returns, with its kind,
    path, null and time. Or a recipe, by name, .toml file or as an object; then `dataset` is the run.
    dataset: a torch Dataset, a tensor, a tuple or mapping of tensors, or a stream (IterableDataset, DataLoader,
    function that returns a generator). A sample is x0, (x0, condition), or a mapping with "x0" and "condition", or with
    "x0" and arguments of the network by name. Float samples are taken as they are, uint8 images are scaled to [-1, 1];
    data_values="uint8" says that floats are images in [-1, 1]. batches: whether a stream yields batches (a DataLoader
    does). Samples by index come in an order of (seed, step); a stream in its own, begins anew at its end, and is read
    as a whole by every process, which keeps its part of each batch.
    run: the folder of the run, for checkpoints, log and resume; mvm.load(run, network=network) reads it. None: nothing
    is kept.

    options: those of recipes (see `mvm options`), with "_" for "."; the tables train, engine and objective may be left
    out: steps, batch, lr, ema, optimizer, compile, precision, accumulate, save_every, seed, preview_every, sample_nfe,
    path_law_mean, ...; drop is objective.label_drop, timesteps path.law.name, as in mvm.loss. recipe: of a network, the
    recipe whose options are the defaults.

    Under torchrun every process calls it. Ctrl-C and SIGTERM save a checkpoint after the step in hand and raise
    KeyboardInterrupt: `resume` then continues bit for bit (a stream: weights, optimizer and step; its place in the data
    where it has state_dict and load_state_dict), and may raise steps; allow_change: it may also change the learning
    rate and its schedule. until: pause at this step. device: by default a network's own; of a recipe the CPU. init:
    (what `mvm.load` takes, weights) to start from. on_log: called in the main process with every line of metrics.jsonl.
    track: trackers that get them too, "auto", "none", or of tensorboard, wandb, mlflow, separated by commas.
    """
    how: dict[str, Any] = {
        "resume": resume,
        "until": until,
        "progress": progress,
        "on_log": on_log,
        "init": init,
        "allow_change": allow_change,
        "track": track,
    }
    if isinstance(network, Recipe | DecoderRecipe | str | Path):
        if recipe is not None or batches is not None:
            raise ValueError("recipe and batches belong to a network and its dataset; here a recipe is trained")
        if dataset is not None and (run is not None or not isinstance(dataset, str | Path)):
            raise ValueError("a recipe names its data: mvm.train(recipe, run); to train on a dataset give a network")
        chosen: Any = network
        if options:
            chosen = load_recipe(str(network)) if isinstance(network, str | Path) else network
            chosen = changed(chosen, dotted(options, chosen))
        return train_recipe(chosen, run if dataset is None else dataset, device=device or "cpu", **how)
    if not isinstance(network, nn.Module):
        raise ValueError(f"network is of type {type(network).__name__}; give a torch module, or a recipe")
    if dataset is None:
        raise ValueError("dataset is missing: mvm.train(network, dataset)")
    base: Any = load_recipe(str(recipe)) if isinstance(recipe, str | Path) else recipe or Recipe()
    given = dotted(options, base)
    base = require_field_recipe(base, f"recipe={recipe}")
    field = _field(network, base, given)
    parameters = [value for value in field.parameters() if value.is_floating_point()]
    if not parameters:
        raise ValueError(f"network ({type(field.network.network).__name__}) has no parameters; give a torch module")
    dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    samples = open_samples(dataset, dtype, batches)
    if isinstance(dataset, DataLoader) and dataset.batch_size and recipe is None:
        given.setdefault("train.batch", dataset.batch_size)
    made = own_recipe(field, samples, base, given)
    return train_recipe(made, run, device=device or parameters[0].device, given=Given(field.network, samples), **how)


def _field(network: nn.Module, base: Recipe, given: Mapping[str, Any]) -> NetworkField:
    """Return the network as mvm.wrap does; options on kind and path are for one that is not wrapped."""
    if isinstance(network, NetworkField):
        for name in ("objective.kind", "path.schedule", "path.T"):
            if name in given:
                raise ValueError(f"{name} is that of mvm.wrap's call; leave it out here")
        return network
    own = adapted(network)
    path = schedule_named(given.get("path.schedule", base.path.schedule), given.get("path.T", base.path.T))
    return wrap(network, kind=given.get("objective.kind", base.objective.kind), path=path, null=own.null, time=own.time)
