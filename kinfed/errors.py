"""The errors a user can cause, each one clear sentence: what was wanted, what came, what to do.

KinfedError
 ├─ ConfigError       an option, a name or a combination that cannot run
 ├─ DataError         bad labels, features that are not numbers
 │   └─ MissingDataError   files of a data set that are neither here nor to be had
 ├─ ModelError        a model that the engine cannot train
 ├─ StorageError      a folder, file or disk that cannot be read or written
 ├─ CheckpointError   a damaged or foreign checkpoint
 └─ PoolError         clients or workers elsewhere that are lost, or cannot be reached

The command line prints the sentence and exits with status 2; a traceback means a bug in kinfed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KinfedError(Exception):
    """Base of all errors that are the caller's to solve."""


class ConfigError(KinfedError):
    pass


class DataError(KinfedError):
    pass


class MissingDataError(DataError):
    """Files of a data set are neither here nor to be had."""


class ModelError(KinfedError):
    pass


class StorageError(KinfedError):
    pass


class CheckpointError(KinfedError):
    pass


class PoolError(KinfedError):
    """The run cannot go on here and now; resumed later, it goes on from its last checkpoint."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """ConfigError for a name that is not registered, with the nearest registered ones."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")
