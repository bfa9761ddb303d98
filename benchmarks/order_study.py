"""Orders and variables on a trained network: distance of N-evaluation samples to the network's own 150-evaluation ones.

    python benchmarks/order_study.py > benchmarks/results/order_study.md     (CPU, about 4 minutes)

What wins on an exact oracle need not win on a network, whose field is rougher, least of all under guidance.
"""

import platform

import torch
from grid_search import ShiftedPower
from tqdm import tqdm

import mvm
from mvm import noise
from mvm.solver import ClassifierFree, PowerGrid, PredictorCorrector, Solver, adams, sample

NFES = (5, 8, 13, 26, 52)


def shifted(predictor: int, corrector: int) -> PredictorCorrector:
    return PredictorCorrector("", PowerGrid(3.0), ShiftedPower(0.01, 0.5), "exact", predictor, corrector)


CANDIDATES: dict[str, Solver] = {
    "P3/C4, r = 4, p = 1.4, phi = t^0.8 (default)": adams(),
    "P4/C5, r = 4, p = 1.4, phi = t^0.8": adams(4, 5),
    "P3/C4, r = 3.5, p = 1, phi = t^0.8": adams(r=3.5, p=1.0),
    "P3/C4, r = 3, phi = (t + 0.01)^0.5": shifted(3, 4),
    "P4/C5, r = 3, phi = (t + 0.01)^0.5": shifted(4, 5),
    "P5/C6, r = 3, phi = (t + 0.01)^0.5": shifted(5, 6),
}


def main() -> None:
    model, seeds = mvm.load("digits"), torch.arange(256)
    x, labels = noise.initial(seeds, model.sample_shape), seeds % model.num_classes
    print("# Orders on a trained network\n\nCommand: `python benchmarks/order_study.py`. ", end="")
    print(
        f"torch {torch.__version__}, {platform.machine()} CPU; digits model, ODE, 256 samples, seeds 0 to 255. ", end=""
    )
    print("Median / root mean square over samples of the RMSE to 150 evaluations.\n")
    print("| CFG | sampler | " + " | ".join(f"nfe {nfe}" for nfe in NFES) + " |")
    print("| --- " * (len(NFES) + 2) + "|")
    for scale in (1.0, 2.0, 4.0):
        rule = ClassifierFree(scale)
        truth = sample(model, x, nfe=150, condition=labels, guidance=rule)
        for name, solver in tqdm(CANDIDATES.items(), desc=f"CFG {scale:g}"):
            cells = []
            for nfe in NFES:
                found = sample(model, x, solver=solver, nfe=nfe, condition=labels, guidance=rule)
                error = ((found - truth) ** 2).flatten(1).mean(1)
                cells.append(f"{float(error.sqrt().median()):.4f} / {float(error.mean().sqrt()):.4f}")
            print(f"| {scale:g} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
