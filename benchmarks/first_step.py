"""How long until the first training step, and how fast are steps then? By way to compile, with a cold and a warm cache.

    python benchmarks/first_step.py cifar10,engine.kernels=true --ways graph blocks recorded --json first-step.json

RECIPE,OPTION=VALUE,...: a shipped recipe on random data. Ways: those of engine.compile, and `recorded`, a trial: blocks
compiled one by one, forward and backward pass recorded as CUDA graphs. Each way runs in processes of its own, the first
with an empty cache of compiled code, the second with what that left. Seconds are from the start of the process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECORDED = "recorded"
WARM_UP = 10  # steps before the speed is measured
STEPS = 100


def record(trainer: Any) -> None:
    """Have a trainer's forward and backward pass replayed as CUDA graphs; its batches keep their shapes."""
    import torch
    from torch import nn
    from torch.utils._pytree import tree_flatten, tree_unflatten

    from mvm.distributed.processes import autocast
    from mvm.objective.matching import Loss

    example = trainer.batch()
    leaves, form = tree_flatten(tuple(example))
    tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    names: list[str] = []

    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learner = trainer.learner

        def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            filled = list(leaves)
            for number, value in zip(tensors, values, strict=True):
                filled[number] = value
            loss = self.learner(type(example)(*tree_unflatten(filled, form)))
            names[:] = loss.parts
            return loss.total, *loss.parts.values()

    with autocast(trainer.recipe.engine, trainer.processes.device):
        torch.set_autocast_cache_enabled(False)  # casts of weights belong into the recording
        replay = torch.cuda.make_graphed_callables(Recorded(), tuple(leaves[number] for number in tensors))

    @contextmanager
    def stay(stay: bool):
        yield

    def call(batch: Any) -> Any:
        leaves, _ = tree_flatten(tuple(batch))
        total, *parts = replay(*(leaves[number] for number in tensors))
        return Loss(total, dict(zip(names, (part.detach().clone() for part in parts), strict=True)))

    call.gradients_stay = stay  # ty: ignore[unresolved-attribute]
    trainer.engine = call


def serve(case: str, way: str, start: float) -> None:
    """Train for some steps, and print the seconds to each stage and the speed."""
    import torch

    from mvm import bench
    from mvm.distributed.processes import Processes
    from mvm.recipes import load_recipe, override
    from mvm.training.field_trainer import FieldTrainer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = {"imported": time.time() - start}
    name, *changes = case.split(",")
    options = dict(change.split("=", 1) for change in changes)
    options["engine.compile"] = "blocks" if way == RECORDED else way
    recipe = bench.on_random_samples(override(load_recipe(name), options))
    images = bench.random_images(recipe, 4 * recipe.train.batch)
    trainer = FieldTrainer(recipe, images, Processes(device=device), None)
    row["built"] = time.time() - start

    def step() -> float:
        trainer.advance()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.time() - start

    if way == RECORDED:
        record(trainer)
    row["step 1"] = step()
    row["step 2"] = step()
    row["step 3"] = step()
    for _ in range(WARM_UP):
        begun = step()
    for _ in range(STEPS):
        trainer.advance()
    row["images/s"] = (STEPS + 1) * recipe.train.batch / (step() - begun)
    (*_, last) = trainer.read()
    row["loss"] = last.values["loss"]
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", metavar="RECIPE[,OPTION=VALUE]...")
    parser.add_argument("--ways", nargs="+", default=["graph", "blocks", RECORDED])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.case, options.serve, float(os.environ["FIRST_STEP_START"]))
        return
    rows = []
    for way in options.ways:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                extra = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
                command = [sys.executable, __file__, options.case, "--serve", way]
                done = subprocess.run(
                    command, env={**os.environ, **extra, "FIRST_STEP_START": str(time.time())},
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                row = (
                    json.loads(done.stdout.splitlines()[-1])
                    if done.returncode == 0
                    else {"failed": done.stderr[-2000:]}
                )
                rows.append({"way": way, "cache": state, **row})
                print(json.dumps(rows[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"case": options.case, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
