"""Data sets by name in SOURCES, and tables of the user's own. Names are fetched on first use: data sets bring pyarrow
and Pillow, which a run on arrays does not need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinfed.data.sources.catalogue import load_source
    from kinfed.data.sources.image_sets import ImageSet
    from kinfed.data.sources.registered import SOURCES
    from kinfed.data.sources.reviews import ReviewOptions
    from kinfed.data.sources.site_tables import SITE_TABLES, SiteTable
    from kinfed.data.sources.source import Source
    from kinfed.data.sources.table import TableOptions
    from kinfed.data.sources.text import TweetSet
    from kinfed.data.sources.wakeword import WakewordDataOptions

_HOME = {
    "SITE_TABLES": "kinfed.data.sources.site_tables",
    "SOURCES": "kinfed.data.sources.registered",
    "ImageSet": "kinfed.data.sources.image_sets",
    "ReviewOptions": "kinfed.data.sources.reviews",
    "SiteTable": "kinfed.data.sources.site_tables",
    "Source": "kinfed.data.sources.source",
    "TableOptions": "kinfed.data.sources.table",
    "TweetSet": "kinfed.data.sources.text",
    "WakewordDataOptions": "kinfed.data.sources.wakeword",
    "load_source": "kinfed.data.sources.catalogue",
}
__all__ = [
    "SITE_TABLES",
    "SOURCES",
    "ImageSet",
    "ReviewOptions",
    "SiteTable",
    "Source",
    "TableOptions",
    "TweetSet",
    "WakewordDataOptions",
    "load_source",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kinfed.data.sources' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
