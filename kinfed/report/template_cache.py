"""What templates were compiled to, kept in the cache folder as Python keeps what modules were compiled to.

Compiling takes half of the time of a small page. Jinja2 looks at the text of a template, so nothing is ever out of
date; a file that is damaged is made again, and a folder that cannot be written costs time, not the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jinja2
from jinja2 import BytecodeCache
from jinja2.bccache import Bucket

from kinfed.core import cache, storage
from kinfed.errors import StorageError


class TemplateCache(BytecodeCache):
    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            content = self._path(bucket).read_bytes()
        except (OSError, StorageError):
            return
        code = cache.unsealed(content, bucket.key)
        if code is not None:
            bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        code = bucket.bytecode_to_string()
        try:
            path = self._path(bucket)
            storage.make_folder(path.parent)
            storage.write_atomically(path, cache.sealed(code, bucket.key))
        except StorageError:
            return  # it is compiled again next time

    def _path(self, bucket: Bucket) -> Path:
        """Of versions of Python and Jinja2 each their own: they do not read each other's code."""
        versions = f"{sys.implementation.cache_tag}-jinja2-{jinja2.__version__}"
        return cache.cache_folder() / "templates" / versions / f"{bucket.key}.code"
