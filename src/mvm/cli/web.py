"""mvm app."""

from mvm.cli.app import Whole, app

MOST_PORT = 65_535


@app.command(name="app")
def web(
    *models: str,
    host: str = "127.0.0.1",
    port: Whole | None = None,
    queue: Whole = 8,
    device: str = "auto",
    open: bool = True,
) -> int:
    """Open a local page: pictures by ODE and SDE side by side, and the field on the plane. Needs no network.

    Parameters
    ----------
    models
        Run directories, exported models, or folders of them; the shipped models are always offered.
    host
        Address to listen on; 0.0.0.0 lets other machines in.
    port
        Port to listen on; the first free one from 7860 on when not given.
    queue
        Visitors served at once; more are asked to come again.
    device
        cpu, cuda, or auto: cuda where there is one.
    open
        Show the page in the browser of this machine; --no-open only serves it.
    """
    from mvm.app.shelf import Shelf, offered
    from mvm.model import choose_device
    from mvm.options import at_least, between, needs

    at_least("queue", queue, 1)
    if port is not None:
        between("port", port, 1, MOST_PORT)
    try:
        from mvm.app.page import serve
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ValueError(needs("the page", "gradio", "web")) from None
    serve(Shelf(offered(models), choose_device(device)), queue, host, port, inbrowser=open)
    return 0
