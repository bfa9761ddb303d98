"""What a published folder says to diffusers: three tables that follow from config.json; the weights are stored once.

They make the scheduler loadable by itself and the folder recognizable. `MVMPipeline` builds from config.json alone, so
the tables are compared with it on reading and never obeyed.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mvm.network import OwnConfig
from mvm.recipes import Recipe
from mvm.solver import Adams
from mvm.solver.variants import once_a_step

Table = dict[str, Any]
INDEX, SCHEDULER, TRANSFORMER = "model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"
MODULE = "mvm.integrations.diffusers"
SETTINGS = ("nfe", "cfg", "low", "high", "internal")  # of a recipe's [sample], what a call decides; the rest scheduler
PARTS = {  # of the pipeline: module and class
    "scheduler": [f"{MODULE}.scheduler", "MVMScheduler"],
    "transformer": [f"{MODULE}.transformer", "MVMTransformer2DModel"],
}


def misfit(recipe: Recipe) -> str:
    """Return why MVMPipeline cannot sample a model as its recipe says, or ""."""
    if isinstance(recipe.network, OwnConfig):
        return "its network is not part of mvm"
    if recipe.codec.kind != "pixels":
        return "it makes pixels, and this model latents"
    if recipe.condition.kind != "labels":
        return f"it takes class labels, and this model has condition.kind '{recipe.condition.kind}'"
    if not recipe.data.square:
        return f"it makes square images, and this model {'x'.join(map(str, recipe.data.shape))} {recipe.data.values}"
    if recipe.codec.scale != 1:
        return f"it takes pixels in [-1, 1], and this model has codec.scale {recipe.codec.scale:g}"
    if not once_a_step(recipe.sample.build_solver()):
        return f"its scheduler evaluates the network once a step, and the solver {recipe.sample.solver} does not"
    return ""


def scheduler_options(recipe: Recipe) -> Table:
    """Return the options of the MVMScheduler that samples as the recipe does."""
    sample, solver = recipe.sample, recipe.sample.build_solver()
    options = {"t_min": sample.t_min} if sample.takes_t_min else {}
    if isinstance(solver, Adams):  # a scheduler does not know the size of a sample
        options = {"spread": solver.for_size(math.prod(recipe.sample_shape)).spread}
    if (shift := sample.shift or recipe.path.law.shift) != 1:  # nor the timestep distribution
        options["shift"] = shift
    return {
        "solver": sample.solver,
        "rho": sample.rho,
        "prediction_type": recipe.objective.kind,
        "schedule": recipe.path.schedule,
        "T": recipe.path.T,
        "solver_options": options or None,
    }


def transformer_options(recipe: Recipe, num_classes: int) -> Table:
    """Return the options of the MVMTransformer2DModel of a recipe's network."""
    return {
        "network_options": asdict(recipe.network),
        "sample_shape": list(recipe.sample_shape),
        "num_classes": num_classes,
        "prediction_type": recipe.objective.kind,
        "schedule": recipe.path.schedule,
        "conditional": recipe.objective.conditional,
        "null": recipe.objective.has_null,
        "T": recipe.path.T,
    }


def pipeline_options(recipe: Recipe, classes: Sequence[str]) -> Table:
    """Return the options of the MVMPipeline beside its parts: the names of the classes, and settings of a call."""
    return {
        "id2label": {str(label): name for label, name in enumerate(classes)},
        "settings": {name: getattr(recipe.sample, name) for name in SETTINGS},
    }


def tables(recipe: Recipe, classes: Sequence[str]) -> dict[str, Table]:
    """Return diffusers' files by name; none where MVMPipeline cannot sample the model as its recipe says."""
    if misfit(recipe):
        return {}
    scheduler, transformer = (kind for _, kind in PARTS.values())
    return {
        INDEX: {"_class_name": "MVMPipeline", **pipeline_options(recipe, classes), **PARTS},
        SCHEDULER: {"_class_name": scheduler, **scheduler_options(recipe)},
        TRANSFORMER: {"_class_name": transformer, **transformer_options(recipe, len(classes))},
    }


def disagreement(table: Any, wanted: Any, where: str = "") -> str:
    """Return the first key of a file's table that says something else than config.json, or "".

    Keys that the file lacks may be of a later version of mvm; which version of diffusers wrote it is its own matter.
    """
    if not isinstance(table, dict) or not isinstance(wanted, dict):
        return "" if table == wanted else where
    for key, value in table.items():
        name = f"{where}.{key}".lstrip(".")
        differs = disagreement(value, wanted[key], name) if key in wanted else name
        if differs and key != "_diffusers_version":
            return differs
    return ""
