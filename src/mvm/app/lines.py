"""The command and the Python lines that make a picture again, pixel for pixel."""

import shlex
from pathlib import Path
from typing import Any

from mvm.app.form import SampleForm
from mvm.model import Model, choose_device


def number(value: float) -> str:
    """Return a number as one writes it: 1, 0.75."""
    return str(int(value)) if value == int(value) else repr(float(value))


def file_name(form: SampleForm, side: str) -> str:
    """Return the name of a picture: MODEL-seed-SEED-ode.png."""
    return f"{Path(form.model).name}-seed-{int(form.seed)}-{side.lower()}.png"


def options(form: SampleForm, side: str, model: Model) -> dict[str, Any]:
    """Return what makes this side's picture, by the names of `mvm sample` and `Model.generate`."""
    how = form.settings(side)
    differing = {
        "num": int(form.images),
        "classes": list(form.classes) or None,
        "seed": int(form.seed),
        "solver": None if how.unnamed and model.tuned else how.solver,  # a solver that is named has its own times
        "nfe": how.nfe,
        "rho": how.rho,
        "cfg": how.cfg,
        "interval": [how.low, how.high] if how.guided else None,
        "internal": how.internal if model.recipe.network.inner_block else None,
        **({"auto": form.auto, "auto_scale": how.auto_scale} if how.auto_scale != 1 else {}),
        "share": 0 if model.recipe.sample.share else None,  # not on the page: a recipe's own is undone
    }
    return {name: value for name, value in differing.items() if value is not None}


def command(form: SampleForm, side: str, model: Model) -> str:
    """Return the `mvm sample` that makes this side's picture."""
    words = ["mvm", "sample", form.model]
    for name, value in options(form, side, model).items():
        parts = value if isinstance(value, list) else [value]
        words += [
            f"--{name.replace('_', '-')}",
            ",".join(part if isinstance(part, str) else number(part) for part in parts),
        ]
    if choose_device("auto").type != model.device.type:
        words += ["--device", str(model.device)]
    return shlex.join([*words, "--out", file_name(form, side)])


def python(form: SampleForm, side: str, model: Model) -> str:
    """Return the Python lines that make this side's picture."""
    where = "" if model.device.type == "cpu" else f".to({str(model.device)!r})"
    asked = ", ".join(f"{name}={value!r}" for name, value in options(form, side, model).items())
    return f"""import mvm

images = mvm.load({form.model!r}){where}.generate({asked})
images.save({file_name(form, side)!r})
"""
