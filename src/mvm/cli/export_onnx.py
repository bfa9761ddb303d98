"""mvm onnx."""

from pathlib import Path

from mvm.cli.app import SamplerOptions, Weights, app


@app.command
def onnx(
    model: str,
    /,
    *,
    out: Path = Path("model.onnx"),
    sampler: SamplerOptions = SamplerOptions(),
    weights: Weights = Weights(),
) -> int:
    """Write a network as ONNX, any batch, float32, with the numbers of a sampler in its metadata.

    examples/onnx_sampler.py makes images from such a file without torch. Settings not given are those of the recipe.
    The solver must evaluate once a step: adams, sa, euler, euler-maruyama, dpm++2m, dpm++3m, unipc, sde-dpm++2m,
    sde-dpm++3m, sa-official or er-sde. The exported network has no inner head.

    Parameters
    ----------
    model
        A run directory, an exported model, the name of a shipped one, or OWNER/NAME on the hub.
    out
        The file to write.
    """
    from mvm.integrations.onnx import write_onnx
    from mvm.model import load

    loaded = load(model, weights.weights, weights.checkpoint)
    settings = sampler.settings(loaded.recipe.sample)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    tables = write_onnx(loaded, out, settings)
    print(
        f"wrote {out}: {tables['recipe']}, {tables['solver']} with {tables['nfe']} evaluations, rho {tables['rho']:g}"
    )
    return 0
