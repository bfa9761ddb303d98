"""mvm onnx."""

from pathlib import Path

from mvm.cli.app import Whole, app, parse_interval


@app.command
def onnx(
    model: str,
    /,
    *,
    out: Path = Path("model.onnx"),
    nfe: Whole | None = None,
    solver: str | None = None,
    rho: float | None = None,
    cfg: float | None = None,
    internal: float | None = None,
    interval: str | None = None,
    weights: str = "ema",
    checkpoint: str = "latest",
) -> int:
    """Write a network as ONNX, any batch, float32, with the numbers of a sampler in its metadata.

    examples/onnx_sampler.py makes images from such a file without torch. Settings not given are those of the recipe.

    Parameters
    ----------
    model
        A run directory, an exported model, the name of a shipped one, or OWNER/NAME on the hub.
    out
        The file to write.
    nfe
        Evaluations of the network per image.
    solver
        One that evaluates once a step: adams, sa, euler, euler-maruyama, dpm++2m, dpm++3m, unipc, sde-dpm++2m,
        sde-dpm++3m, sa-official or er-sde.
    rho
        Noise of the reverse process: 0 is the ODE, 1 the paper's SDE.
    cfg
        Classifier-free guidance scale; 1 is none.
    internal
        Only 1, none: the exported network has no inner head.
    interval
        Where guidance acts, LOW,HIGH in log-SNR progress (0 noise, 1 image), e.g. 0.6,0.8.
    weights
        ema, model (the raw weights), or another average that the run keeps.
    checkpoint
        latest, best (by the previews), or a step number.
    """
    from mvm.integrations.onnx import write_onnx
    from mvm.model import load

    asked = {"nfe": nfe, "solver": solver, "rho": rho, "cfg": cfg, "internal": internal}
    low, high = (None, None) if interval is None else parse_interval(interval)
    loaded = load(model, weights, checkpoint)
    settings = loaded.recipe.sample.asked(**asked, low=low, high=high)
    if interval is not None and not settings.guided:
        raise ValueError(f"--interval {interval} acts on guidance; give its scale too, e.g. --cfg 1.5")
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    tables = write_onnx(loaded, out, settings)
    print(
        f"wrote {out}: {tables['recipe']}, {tables['solver']} with {tables['nfe']} evaluations, rho {tables['rho']:g}"
    )
    return 0
