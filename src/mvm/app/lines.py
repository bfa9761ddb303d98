"""The command and the Python lines that make a picture again, pixel for pixel."""

import shlex
from pathlib import Path

import torch

from mvm.app.form import Form
from mvm.model import Model, choose_device


def number(value: float) -> str:
    """Return a number as one writes it: 1, 0.75."""
    return str(int(value)) if value == int(value) else repr(float(value))


def file_name(form: Form, side: str) -> str:
    """Return the name of a picture: MODEL-seed-SEED-ode.png."""
    return f"{Path(form.model).name}-seed-{int(form.seed)}-{side.lower()}.png"


def command(form: Form, side: str, model: Model) -> str:
    """Return the `mvm sample` that makes this side's picture."""
    how = form.settings(side)
    options = {
        "--num": number(form.images),
        "--classes": ",".join(map(str, form.classes)),
        "--seed": str(int(form.seed)),
        "--solver": "" if how.unnamed and model.tuned else how.solver,  # a solver that is named has its own times
        "--nfe": number(how.nfe),
        "--rho": number(how.rho),
        "--cfg": number(how.cfg),
        "--interval": f"{number(how.low)},{number(how.high)}" if how.guided else "",
        "--internal": number(how.internal) if model.recipe.network.inner_block else "",
        "--share": "0" if model.recipe.sample.share else "",  # not on the page: a recipe's own is undone
        "--device": "" if choose_device("auto").type == model.device.type else str(model.device),
        "--out": file_name(form, side),
    }
    words = [word for name, value in options.items() if value for word in (name, value)]
    return shlex.join(["mvm", "sample", form.model, *words])


def python(form: Form, side: str, device: torch.device) -> str:
    """Return the Python lines that make this side's picture."""
    how, draw = form.settings(side), form.draw()
    where = "" if device.type == "cpu" else f".to({str(device)!r})"
    names = [name for name in ("cfg", "internal") if getattr(how, name) != 1]
    guided = "".join(f", {name}={number(getattr(how, name))}" for name in (*names, *(("low", "high") if names else ())))
    classes = f", classes={draw.classes!r}" if draw.classes else ""
    return f"""from pathlib import Path

import mvm
from mvm.generate import generate_all, write_images
from mvm.recipes import SampleConfig
from mvm.samples import Draw

model = mvm.load({form.model!r}){where}
draw = Draw({draw.num}, seed={draw.seed}{classes})
settings = SampleConfig({how.solver!r}, nfe={how.nfe}, rho={number(how.rho)}{guided})
made = generate_all(model, draw.chosen_labels(model.num_classes), draw.chosen_seeds(), settings)
write_images(Path({file_name(form, side)!r}), made.images, made.labels, model.classes)
"""
