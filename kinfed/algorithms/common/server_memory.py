"""What a server keeps of every client has a size: methods that keep whole models refuse what would not fit."""

from __future__ import annotations

from kinfed.errors import ConfigError


def check_memory(what: str, num_bytes: float, max_gb: float) -> None:
    """Refuse `what`, a sentence about what is kept, where it takes more than `max_gb` gigabytes."""
    needed = num_bytes / 1e9
    if needed > max_gb:
        raise ConfigError(
            f"{what}: {needed:.1f} GB, more than max_gb={max_gb:g}; take fewer clients or a smaller model, or raise "
            "max_gb"
        )
