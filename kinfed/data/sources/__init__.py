"""Data sets by name in SOURCES, and tables of the user's own."""

from __future__ import annotations

from kinfed.data.registered import SOURCES
from kinfed.data.source import Source
from kinfed.data.sources.catalogue import load_source
from kinfed.data.sources.image_sets import ImageSet
from kinfed.data.sources.reviews import ReviewOptions
from kinfed.data.sources.site_tables import SITE_TABLES, SiteTable
from kinfed.data.sources.table import TableOptions
from kinfed.data.sources.text import TweetSet
from kinfed.data.sources.wakeword import WakewordDataOptions

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
