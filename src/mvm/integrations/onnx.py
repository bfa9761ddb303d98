"""Networks outside of mvm: as a program of torch.export, and as ONNX with a sampler's tables in its metadata.

With the tables a sampler is a loop of a few lines in any language: examples/onnx_sampler.py.
"""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mvm.files import atomic
from mvm.generate import solver_of
from mvm.integrations.plans import SchedulePlan, build_solver, plan_on
from mvm.latent.codec import require_unit_scale
from mvm.model import Model
from mvm.network import Own
from mvm.options import needs
from mvm.path import as_time, to_x0
from mvm.path.field import network_time
from mvm.settings import SampleConfig
from mvm.solver.base import TablePlan
from mvm.solver.guidance import Interval
from mvm.solver.table import Row

METADATA = "mvm"  # the key of the tables in the file's metadata
FORMAT = 1
SETTINGS = ("solver", "nfe", "rho", "cfg", "low", "high")  # among the tables
INPUTS, OUTPUT = ("x", "level", "label"), "prediction"
LIMIT = 2**31 - 2**24  # bytes of weights: a protobuf file ends at 2 GiB


class Prediction(nn.Module):
    """(x, level, label) -> prediction: a network without its inner head."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, level: Tensor, label: Tensor) -> Tensor:
        return self.network(x, level, label).prediction


def export_network(model: Model) -> ExportedProgram:
    """Return the network as a program of torch.export for any batch: (x, level, label) -> prediction.

    level (B,) float32: the schedule's noise level; label (B,) int64: the number of classes is the null class.
    """
    if isinstance(model.network, Own):
        raise ValueError("a network of your own is exported by torch.onnx.export itself; mvm onnx takes dit and ddt")
    model.require_labels("an exported network")
    device, size = model.device, 2  # a batch of one would be taken for a constant
    example = (
        torch.zeros(size, *model.sample_shape, device=device),
        torch.full((size,), 0.5, device=device),
        torch.zeros(size, dtype=torch.int64, device=device),
    )
    shapes = ({0: Dim("batch", min=1)},) * len(INPUTS)
    return torch.export.export(Prediction(model.network).eval(), example, dynamic_shapes=shapes)


def _step(model: Model, plan: SchedulePlan, index: int, row: Row, guided: bool) -> dict[str, Any]:
    """Return one evaluation and the step after it, as numbers.

    x0_hat is affine in the state and the prediction: its weights are what (1, 0) and (0, 1) give.
    """
    t = plan.times[index]
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    kind = model.recipe.objective.kind
    return {
        "t": t,
        "level": float(network_time(model.network.time, as_time(t), model.schedule)),
        "scale": plan.scales[index],
        "from_x": float(to_x0(kind, zero, one, t, model.schedule)),
        "from_prediction": float(to_x0(kind, one, zero, t, model.schedule)),
        "guided": guided,
        "decay": row.decay,
        "std": row.std,
        "predict": list(row.predict),
        "correct": list(row.correct),
    }


def sampler_tables(model: Model, settings: SampleConfig) -> dict[str, Any]:
    """Return everything but the network that a sampler needs, ready for JSON: who, what, and numbers for every step."""
    if settings.internal != 1:
        raise ValueError(f"internal={settings.internal}: the exported network has no inner head; use internal 1")
    if settings.auto_scale != 1:
        raise ValueError(f"auto_scale={settings.auto_scale}: no second network is exported; use auto_scale 1")
    if settings.share:
        raise ValueError(f"share={settings.share}: the exported network is one piece; use share 0")
    model.require_labels("mvm onnx")
    require_unit_scale(model.codec, "the exported sampler")
    build_solver(settings.solver, {})  # refuses what evaluates more than once a step
    solver = solver_of(model, settings)
    plan = solver.plan(model.schedule, settings.nfe, settings.rho)
    if not isinstance(plan, TablePlan):
        raise ValueError(f"solver='{settings.solver}' has no table in x0_hat to write; use 'adams', 'sa' or 'dpm++2m'")
    planned = plan_on(model.schedule, plan, solver)
    inside = Interval(settings.low, settings.high)
    guided = [settings.cfg != 1 and bool(inside.contains(t, model.schedule)) for t in planned.times[:-1]]
    return {
        "format": FORMAT,
        "recipe": model.recipe.name,
        "weights": model.origin.get("sha256", ""),
        "codec": model.recipe.codec.kind,
        "shape": list(model.sample_shape),
        "classes": list(model.classes),
        "null": model.network.null,
        "conditional": model.recipe.objective.conditional,
        "schedule": model.recipe.path.schedule,
        "kind": model.recipe.objective.kind,
        **{name: getattr(settings, name) for name in SETTINGS},
        "first": planned.first / planned.scales[0],
        "steps": [_step(model, planned, i, row, guided[i]) for i, row in enumerate(plan.rows)],
    }


def write_onnx(model: Model, out: Path, settings: SampleConfig | None = None) -> dict[str, Any]:
    """Write the network, float32, for any batch, with a sampler's tables in its metadata; return these.

    settings: the sampler's; default: the recipe's.
    """
    if not out.name or out.is_dir():  # put_in_place would have a folder make way
        raise ValueError(f"--out {out} is a folder; give the name of a file, e.g. {out / 'model.onnx'}")
    tables = sampler_tables(model, settings or model.recipe.sample)
    count = sum(parameter.numel() for parameter in model.network.parameters())
    if 4 * count > LIMIT:
        raise ValueError(
            f"{count:,} parameters in float32 do not fit in one ONNX file, which ends at 2 GiB; "
            "use mvm.integrations.onnx.export_network"
        )
    try:
        import onnxscript  # noqa: F401  torch's exporter asks for it late, and not by name
    except ImportError as error:
        raise ValueError(needs("mvm onnx", "onnx with onnxscript", "onnx")) from error
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what the exporter says of its own workings
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                export_network(model), input_names=list(INPUTS), output_names=[OUTPUT], dynamo=True, verbose=False
            )
            assert program is not None
            program.model.metadata_props[METADATA] = json.dumps(tables)
            with atomic(out) as temporary:
                program.save(temporary, external_data=False)
    finally:
        logging.disable(before)
    return tables
