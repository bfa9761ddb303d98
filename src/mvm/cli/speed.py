"""mvm bench."""

import json
from dataclasses import replace

from mvm.cli.app import Device, Dotted, JsonFile, SamplerOptions, Whole, app


@app.command
def bench(
    recipe: str,
    /,
    *,
    steps: Whole = 30,
    samples: Whole = 64,
    sampler: SamplerOptions = SamplerOptions(),
    grow: bool = False,
    device: Device = "auto",
    json_file: JsonFile = None,
    overrides: Dotted = None,
) -> int:
    """Measure a recipe's speed here: images/s, MFU and memory of training and sampling, on random images.

    MFU is 6 x multiply-adds of one forward pass per image, nothing computed twice, over the speed of a large
    matrix product measured beside it (GPU alone). Options of the recipe can be changed as in `mvm train`.

    Parameters
    ----------
    recipe
        A shipped recipe (see: mvm recipes) or a .toml file.
    steps
        Training steps timed, after a warm-up; 0: none.
    samples
        Images sampled; 0: none.
    grow
        Also double resolution, depth and batch, each alone: how the cost grows.
    """
    from mvm.bench import bench as run_bench
    from mvm.bench import growth, table
    from mvm.distributed.processes import processes
    from mvm.files import write_text
    from mvm.model import choose_device
    from mvm.options import at_least
    from mvm.recipes import load_recipe, override, require_field_recipe
    from mvm.training.data import completed

    at_least("steps", steps, 0)
    at_least("samples", samples, 0)
    chosen = completed(override(require_field_recipe(load_recipe(recipe), recipe), overrides or {}))
    chosen = replace(chosen, sample=sampler.settings(chosen.sample))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    with processes(choose_device(device)) as place:
        found = run_bench(chosen, place, steps=steps, num=samples, progress=place.main)
        tell = print if place.main else lambda text: None  # one of torchrun's processes speaks
        if steps:
            tell(table([{"training": chosen.name, **found["training"]}], "training"))
        tell(f"memory estimated beforehand: {found['memory_estimate_gb']:.4g} GB (bf16, compiled, on one GPU)")
        if samples:
            made = found["sampling"]
            tell(f"sampling: {made['images_per_second']:.4g} images/s at {made['nfe']} evaluations")
        if grow:
            found["growth"] = growth(chosen, place, progress=place.main)
            tell(table(found["growth"], "change"))
    if json_file is not None and place.main:
        write_text(json_file, json.dumps(found, indent=2) + "\n")
    return 0
