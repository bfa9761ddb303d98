"""Which constants of `adams` give the lowest FID on a model? A pattern search at each NFE, every trial a line of JSON.

    python benchmarks/fid_search.py MODEL --ref ref.npz --inception FOLDER --out trials.jsonl --plan 8:0:120,13:0:160

--plan: NFE:rho:seconds for each search, in this order. Every trial has the same noises and labels, of seeds that no
published figure uses. The unknowns are the logarithms of c, b, end_b and spread; then the orders, one change at a time.
FID in TF32: it ranks trials, and is no figure to quote.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from mvm import noise
from mvm.generate import Sampler, cycle_labels
from mvm.metrics.distances import _frechet, _square_root
from mvm.metrics.extractors import Sources, open_extractor
from mvm.metrics.moments import load_moments, moments
from mvm.model import choose_device, load
from mvm.pixels import to_uint8
from mvm.precision import arithmetic
from mvm.solver import Adams, adams, sample
from mvm.solver.adams import ODE_B, SDE_B
from mvm.solver.tune import tune

SEED = 10_000_000
ORDERS = ({"ending": 3}, {"ending": 5}, {"predictor": 3}, {"predictor": 5}, {"corrector": 5})


class Trials:
    """fid(solver, nfe): of the same noises each time; noted in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = choose_device(options.device)
        self.model = load(options.model).to(self.device).eval().requires_grad_(False)
        if self.device.type == "cuda":
            Sampler(self.model, compile=True)
        self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.extractor = open_extractor("inception", Sources(options.inception), self.device)
        reference = load_moments(Path(options.ref)).moments.to(self.device)
        self.reference, self.root = reference, _square_root(reference.covariance)
        self.labels = cycle_labels((), options.num, self.model.num_classes).to(self.device)
        self.seeds = noise.derive(SEED, torch.arange(options.num)).to(self.device)
        self.batch, self.out = options.batch, Path(options.out)
        self.end = 0.0  # of the search under way
        self.base = replace(adams().for_size(3072), b=ODE_B, **json.loads(options.base))
        self.best: dict[tuple, tuple[float, Adams]] = {}

    @torch.no_grad()
    def images(self, solver: Adams, nfe: int, rho: float, part: slice) -> torch.Tensor:
        seeds, labels = self.seeds[part], self.labels[part]
        x = noise.initial(seeds, self.model.sample_shape)
        with arithmetic(self.precision, self.device):
            return sample(
                self.model,
                x,
                solver=solver,
                nfe=nfe,
                rho=rho,
                schedule=self.model.schedule,
                condition=labels,
                seeds=seeds,
            )

    @torch.no_grad()
    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.extractor.compute(to_uint8(images))["pool"]

    def fid(self, solver: Adams, nfe: int, rho: float = 0.0, tag: str = "") -> float:
        parts = [slice(i, i + self.batch) for i in range(0, len(self.seeds), self.batch)]
        found = torch.cat([self.features(self.images(solver, nfe, rho, part)) for part in parts])
        value = _frechet(self.reference, self.root, moments(found))
        with self.out.open("a") as file:
            told = {name: v for name, v in asdict(solver).items() if v is not None and name not in ("name", "t_min")}
            file.write(json.dumps({"fid": round(value, 4), "nfe": nfe, "rho": rho, "tag": tag, **told}) + "\n")
        print(f"{value:8.3f} nfe {nfe} rho {rho} {tag} {told}", flush=True)
        return value

    def better(self, value: float, solver: Adams, nfe: int, rho: float) -> bool:
        if (nfe, rho) in self.best and self.best[nfe, rho][0] <= value:
            return False
        self.best[nfe, rho] = (value, solver)
        return True

    def search(self, nfe: int, rho: float, seconds: float, passes: int) -> None:
        self.end = time.time() + seconds
        base = replace(adams().for_size(3072), b=SDE_B) if rho else self.base
        self.better(self.fid(base, nfe, rho), base, nfe, rho)
        factor = 1.8
        for number in range(passes):
            for name in ("spread", "c", "b", "end_b"):
                if name == "end_b" and rho and nfe > 12:
                    continue
                for way in (factor, 1 / factor):
                    if time.time() > self.end:
                        return
                    solver = self.best[nfe, rho][1]
                    trial = replace(solver, **{name: getattr(solver, name) * way})
                    if self.better(self.fid(trial, nfe, rho), trial, nfe, rho):
                        break
            if number == 0:
                for change in ORDERS:
                    if time.time() > self.end:
                        return
                    trial = replace(self.best[nfe, rho][1], **change)
                    self.better(self.fid(trial, nfe, rho), trial, nfe, rho)
            factor = factor**0.6

    def tuned(self, nfe: int, num: int) -> None:
        """FID of times fitted to the model."""
        x, labels = noise.initial(self.seeds[:num], self.model.sample_shape), self.labels[:num]
        with torch.no_grad(), arithmetic("fp32", self.device):
            found = tune(self.model, x, nfe, schedule=self.model.schedule, condition=labels)
        print("tuned", nfe, found.before, found.after, flush=True)
        self.fid(found.solver, nfe, tag="tuned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ref", required=True)
    parser.add_argument("--inception", required=True)
    parser.add_argument("--out", default="trials.jsonl")
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--plan", default="8:0:120,13:0:160")
    parser.add_argument("--base", default="{}", help="constants to start an ODE's search from, as JSON")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--tune", default="")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    trials = Trials(options)
    for nfe in (int(n) for n in options.tune.split(",") if n):
        trials.tuned(nfe, 64)
    for nfe, rho, seconds in (map(float, part.split(":")) for part in options.plan.split(",") if part):
        trials.search(int(nfe), rho, seconds, options.passes)
    for (nfe, rho), (value, solver) in trials.best.items():
        print("best", nfe, rho, value, solver, flush=True)


if __name__ == "__main__":
    main()
