"""`python -m mvm`."""

from mvm.cli import main

if __name__ == "__main__":
    main()
