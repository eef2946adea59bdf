"""`python -m kinfed` is the command `kinfed`."""

from kinfed.cli import main

main()
