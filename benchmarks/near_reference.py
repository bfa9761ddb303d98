"""How near do the images of every solver come to those of a long run, on the same noise? ODE; RMSE by solver and NFE.

    python benchmarks/near_reference.py MODEL --out near.json [--guided] [--device cuda]
    python benchmarks/near_reference.py tables near.json ...              every cell as Markdown, with brightness
    python benchmarks/near_reference.py short near.json ...               the rows and NFEs of results/solvers.md
    python benchmarks/near_reference.py standing near.json ...            adams over the least, a row for each file

MODEL: a run, an exported or a shipped model. --guided: with the guidance of the model's recipe. Besides the RMSE: the
error of the std of image brightness (mean of all values of a sample) in percent. The reference is the mean of two long
runs by different solvers; half their distance is the floor. float32, matrix products in TF32 on a GPU.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mvm import noise
from mvm.files import write_text
from mvm.generate import cycle_labels
from mvm.model import choose_device, load
from mvm.network import DDT
from mvm.solver import SOLVERS, adams, sa, sample, solver_named
from mvm.solver.peers import SigmaGrid, dpm, ipndm, unipc

NFES = (4, 5, 6, 8, 10, 13, 16, 20, 26, 39, 52, 65)
PEERS = ("adams", "adams-power", "dpm++2m", "dpm++3m", "unipc", "deis", "ipndm", "heun", "euler")
SHORT_NFES = (4, 5, 6, 8, 10, 13, 20, 26, 39, 65)
SHORT = (
    "adams", "adams-power", "sa, t_min 1e-3", "sa, t_min 1e-4", "dpm++2m", "dpm++2m, r 0.01 to 40", "unipc", "deis",
    "ipndm",
)  # fmt: skip
MODELS = {
    "cifar10": "shipped CIFAR-10 model",
    "second": "second CIFAR-10 model",
    "ddt": "latent model",
    "third": "small CIFAR-10 model",
    "ddt-cpu": "small latent model",
}
SEED = 7_000_000
LONG = 250


def solvers(names: list[str]) -> dict:
    """Return solvers by name: the peers on the grids they recommend, and some on the other one."""
    found = {name: solver_named(name) for name in names or PEERS}
    if names:
        return found
    clean = SigmaGrid("karras", 0.01, 40.0)
    return found | {
        "sa, t_min 1e-3": sa(),
        "sa, t_min 1e-4": sa(t_min=1e-4),
        "dpm++2m, log-SNR": dpm(2, "log-snr"),
        "dpm++3m, log-SNR": dpm(3, "log-snr"),
        "ipndm, r 0.01 to 40": ipndm(grid=clean),
        "dpm++2m, r 0.01 to 40": dpm(2, clean),
        "unipc, r 0.01 to 40": unipc(grid=SigmaGrid("log-snr", 0.01, 40.0)),
    }


def measure(options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    model = load(options.model).to(device).eval().requires_grad_(False)
    if device.type == "cuda" and not isinstance(model.network, DDT):
        model.network.compile(dynamic=False)
    labels = cycle_labels((), options.num, model.num_classes).to(device)
    x = noise.initial(noise.derive(SEED, torch.arange(options.num)).to(device), model.sample_shape)
    guidance = model.recipe.sample.guidance() if options.guided else None

    def made(solver, nfe: int) -> torch.Tensor:
        how = {"schedule": model.schedule, "condition": labels, "guidance": guidance}
        return sample(model, x, solver=solver, nfe=nfe, **how).double()

    long = [made(adams(c=0.005), options.long), made(unipc(grid=SigmaGrid("log-snr", 1e-3, 300.0)), options.long)]
    truth = (long[0] + long[1]) / 2
    spread = truth.flatten(1).mean(1).std()
    cells = []
    for name, solver in tqdm(solvers(options.solvers).items(), desc="solvers"):
        for nfe in options.nfe:
            error = made(solver, nfe) - truth
            bright = float((truth + error).flatten(1).mean(1).std() / spread - 1)
            each = error.flatten(1).square().mean(1).sqrt()
            rmse = float(error.square().mean().sqrt())
            cells.append(
                {"solver": name, "nfe": nfe, "rmse": rmse, "median": float(each.median()), "brightness": bright}
            )
    facts = {
        "model": options.model,
        "guided": options.guided,
        "num": options.num,
        "seed": SEED,
        "long": options.long,
        "floor": float((long[0] - long[1]).square().mean().sqrt()) / 2,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }
    write_text(Path(options.out), json.dumps({"facts": facts, "cells": cells}, indent=1) + "\n")


def named(facts: dict[str, Any]) -> str:
    """Return model, guidance and noises of a file in words."""
    how = "guided" if facts["guided"] else "no guidance"
    return f"{MODELS.get(facts['model'], facts['model'])}, {how}, {facts['num']} noises"


def table(told: dict[str, Any], short: bool = False) -> str:
    """Return RMSE by solver and NFE as Markdown, bold within 3 % of the column's least.

    short: the solvers and NFEs of SHORT and SHORT_NFES; otherwise all, with the error of the std of brightness in
    percent. The least is of all solvers that were measured.
    """
    cells = {(cell["solver"], cell["nfe"]): cell for cell in told["cells"]}
    names = [name for name in SHORT if name in {n for n, _ in cells}] if short else dict.fromkeys(n for n, _ in cells)
    nfes = SHORT_NFES if short else sorted({nfe for _, nfe in cells})
    least = {nfe: min((c["rmse"] for (_, n), c in cells.items() if n == nfe), default=0.0) for nfe in nfes}
    lines = [f"| solver | {' | '.join(map(str, nfes))} |", f"|---|{'---|' * len(nfes)}"]
    for name in names:
        row = []
        for nfe in nfes:
            cell = cells.get((name, nfe))
            text = "-" if cell is None else f"{cell['rmse']:.4f}"
            text += "" if cell is None or short else f" ({100 * cell['brightness']:+.0f})"
            row.append(f"**{text}**" if cell and cell["rmse"] <= 1.03 * least[nfe] else text)
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def standing(files: Sequence[dict[str, Any]]) -> str:
    """Return the RMSE of adams over the least of all solvers by file and NFE as Markdown, bold up to 1.03.

    A dagger: adams is below twice the floor, so that the quotient says little.
    """
    nfes = sorted({cell["nfe"] for told in files for cell in told["cells"]})
    lines = [f"| model | {' | '.join(map(str, nfes))} |", f"|---|{'---|' * len(nfes)}"]
    for told in files:
        row = []
        for nfe in nfes:
            rmse = {cell["solver"]: cell["rmse"] for cell in told["cells"] if cell["nfe"] == nfe}
            quotient = rmse["adams"] / min(rmse.values())
            text = f"**{quotient:.3f}**" if quotient <= 1.03 else f"{quotient:.3f}"
            row.append(text + "†" * (rmse["adams"] < 2 * told["facts"]["floor"]))
        lines.append(f"| {named(told['facts'])} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model, or one of the words tables, short, standing")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", default="near.json")
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--num", type=int, default=48)
    parser.add_argument("--long", type=int, default=LONG)
    parser.add_argument("--nfe", type=lambda text: [int(n) for n in text.split(",")], default=list(NFES))
    parser.add_argument("--solvers", type=lambda text: text.split(","), default=[])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if unknown := [name for name in options.solvers if name not in SOLVERS]:
        parser.error(f"--solvers {unknown[0]}: unknown; one of {', '.join(SOLVERS)}")
    told = [json.loads(path.read_text()) for path in options.files]
    match options.model:
        case "tables" | "short":
            for each in told:
                floor = f"floor {each['facts']['floor']:.4f}"
                print(f"{named(each['facts'])}; {floor}\n\n{table(each, options.model == 'short')}\n")
        case "standing":
            print(standing(told))
        case _:
            measure(options)


if __name__ == "__main__":
    main()
