"""mvm tune."""

from typing import Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import KINDS, GivenOptions, Whole, app, with_sampler_options


@Parameter(name="*", group="Sampler")
@with_sampler_options({name: KINDS[name] for name in ("cfg", "interval")})
class Guidance(GivenOptions):
    """The options of guidance."""


@app.command
def tune(
    model: str,
    /,
    *,
    nfe: str = "8",
    guidance: Guidance = Guidance(),
    num: Whole = 16,
    rounds: Whole = 6,
    long: Annotated[Whole, Parameter(name="--reference-nfe")] = 100,
    seed: int = 0,
    device: str = "auto",
) -> int:
    """Fit the default solver's times to a model, on its own trajectories, and store them with it.

    From then on they are used wherever the model is sampled as an ODE with that number of evaluations and guidance,
    and no solver is named. The command takes (nfe + 4) nfe evaluations of NUM images a round: minutes on a CPU for a
    small model.

    Parameters
    ----------
    model
        A run directory or an exported model. One that ships in the package is exported first.
    nfe
        Numbers of evaluations to fit times for, separated by commas.
    num
        Images that the times are fitted to; as many others judge them.
    rounds
        Steps of the fit at most.
    long
        Evaluations of the run that counts as exact.
    seed
        Seed of the images.
    device
        cpu, cuda, or auto: cuda where there is one.
    """
    from pathlib import Path

    import torch
    from tqdm import tqdm

    from mvm import noise
    from mvm.generate import cycle_labels
    from mvm.model import choose_device, load
    from mvm.options import at_least
    from mvm.published import is_published
    from mvm.published.tuned import Entry, read_tuned, write_tuned
    from mvm.recipes import RECIPE
    from mvm.solver import adams, sample
    from mvm.solver.tune import tune as fit

    folder = Path(model)
    if not (folder / RECIPE).is_file() and not is_published(folder):
        raise ValueError(f"'{model}' is no folder to store times in; first: mvm export {model} --out DIR")
    counts = [int(part) for part in nfe.split(",") if part.strip().isdigit()]
    if not counts:
        raise ValueError(f"--nfe {nfe}: whole numbers separated by commas are needed, e.g. 5,8,13")
    at_least("num", num, 1)
    loaded = load(model).to(choose_device(device))
    settings = loaded.recipe.sample
    if not settings.unnamed:
        raise ValueError(
            f"'{model}' is sampled by '{settings.solver}' with sample.tuned={settings.tuned}, as its recipe says, and "
            "fitted times are for adams alone; sample it with --solver adams instead"
        )
    settings = guidance.settings(settings).canonical()
    loaded.recipe.require_guidance("cfg", settings.cfg)
    loaded.require_labels("mvm tune")
    labels = cycle_labels((), 2 * num, loaded.num_classes).to(loaded.device)
    x = noise.initial(noise.derive(seed, torch.arange(2 * num)).to(loaded.device), loaded.sample_shape)
    entries, weights = read_tuned(folder, loaded.origin["sha256"]), loaded.origin["sha256"]
    for count in counts:
        how: dict[str, Any] = {"schedule": loaded.schedule, "guidance": settings.guidance()}
        with tqdm(total=2 + rounds * (count + 4), desc=f"tune, {count} evaluations", unit="run") as bar:

            def shown(_: int, rmse: float, bar: tqdm = bar) -> None:
                bar.update()
                bar.set_postfix_str(f"RMSE {rmse:.4f}")

            found = fit(
                loaded, x[:num], count, condition=labels[:num], reference_nfe=long, rounds=rounds, on_solve=shown, **how
            )
        others: dict[str, Any] = {"condition": labels[num:], **how}
        exact = sample(loaded, x[num:], nfe=long, solver=adams(), **others)
        default, tuned = (
            float((sample(loaded, x[num:], nfe=count, solver=solver, **others) - exact).square().mean().sqrt())
            for solver in (adams(), found.solver)
        )
        print(f"nfe {count}: RMSE to {long} evaluations, {num} images not fitted to: {default:.4f} -> {tuned:.4f}")
        if tuned >= default:
            print(f"nfe {count}: the default is as good; nothing is stored for it")
            continue
        entry = Entry(count, settings.cfg, settings.low, settings.high, settings.internal, found.solver, default, tuned)
        entries[entry.key] = entry
        write_tuned(folder, weights, entries)
        print(f"stored in {folder / 'tuned.json'}; mvm sample {model} --nfe {count} uses it")
    return 0
