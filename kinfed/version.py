"""The version, in one place: packaging, `kinfed --version`, run folders and checkpoints take it from here."""

__version__ = "0.2.0"
