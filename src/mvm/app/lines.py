"""The command and the Python lines that make a picture again, pixel for pixel."""

import shlex
from pathlib import Path

import torch

from mvm.app.form import Form
from mvm.model import Model, choose_device
from mvm.recipes import SampleConfig


def number(value: float) -> str:
    """Return a number as one writes it: 1, 0.75."""
    return str(int(value)) if value == int(value) else repr(float(value))


def file_name(form: Form, side: str) -> str:
    """Return the name of a picture: MODEL-seed-SEED-ode.png."""
    return f"{Path(form.model).name}-seed-{int(form.seed)}-{side.lower()}.png"


def _other_options(model: Model) -> dict[str, str]:
    """Return options that undo what a recipe has beyond the fields of the page."""
    plain, own = SampleConfig(), model.recipe.sample
    return {
        f"--{name}": number(getattr(plain, name))
        for name in ("internal", "share")
        if getattr(own, name) != getattr(plain, name)
    }


def command(form: Form, side: str, model: Model) -> str:
    """Return the `mvm sample` that makes this side's picture."""
    how = form.settings(side)
    options = {
        "--num": number(form.images),
        "--classes": ",".join(map(str, form.classes)),
        "--seed": str(int(form.seed)),
        "--solver": how.solver,
        "--nfe": number(how.nfe),
        "--rho": number(how.rho),
        "--cfg": number(how.cfg),
        "--interval": f"{number(how.low)},{number(how.high)}" if how.guided else "",
        **_other_options(model),
        "--device": "" if choose_device("auto").type == model.device.type else str(model.device),
        "--out": file_name(form, side),
    }
    words = [word for name, value in options.items() if value for word in (name, value)]
    return shlex.join(["mvm", "sample", form.model, *words])


def python(form: Form, side: str, device: torch.device) -> str:
    """Return the Python lines that make this side's picture."""
    how, draw = form.settings(side), form.draw()
    where = "" if device.type == "cpu" else f".to({str(device)!r})"
    guided = f", cfg={number(how.cfg)}, low={number(how.low)}, high={number(how.high)}" if how.guided else ""
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
write_images(Path({file_name(form, side)!r}), made.images, made.labels)
"""
