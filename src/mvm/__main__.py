"""The `mvm` command, and `python -m mvm`."""

from mvm.process import interruptible_imports


def main() -> None:
    """Run the command line; Ctrl-C counts from the first import on."""
    interruptible_imports()
    from mvm.cli import main as run

    run()


if __name__ == "__main__":
    main()
