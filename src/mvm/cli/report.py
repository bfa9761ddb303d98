"""mvm report."""

from pathlib import Path

from mvm.cli.app import app


@app.command
def report(run: Path, /, *, out: Path | None = None) -> int:
    """Write one offline page about a training run: curves, previews, settings, warnings, what to do next.

    Works at any time: while the run trains, after a crash, after the end.

    Parameters
    ----------
    run
        Run directory.
    out
        The file to write; default RUN/report.html.
    """
    from mvm.evaluation.run_report import write_run_report

    print(f"wrote {write_run_report(run, out)}; open it in a browser")
    return 0
