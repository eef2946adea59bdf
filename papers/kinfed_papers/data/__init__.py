"""The data set that one paper needs: wake words, heard by simulated devices. The plugin that registers it."""

from kinfed.data.sources import SOURCES

SOURCES.register(
    "wakeword",
    "kinfed_papers.data.wakeword:load",
    summary="a wake word on five types of devices, a substitute for Self-FL's private audio",
    options="kinfed_papers.data.wakeword:WakewordDataOptions",
    names_clients=True,
)
