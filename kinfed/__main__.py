"""`python -m kinfed` is the command `kinfed`."""

from kinfed.cli.app import main

main()
