"""The errors a user can cause, each one clear sentence: what was wanted, what came, what to do. The command line prints
the sentence and exits with status 2; a traceback means a bug in kinfed."""

import difflib
from collections.abc import Iterable


class KinfedError(Exception):
    """Base of all errors that are the caller's to solve."""


class ConfigError(KinfedError):
    """An option, a name or a combination that cannot run."""


class DataError(KinfedError):
    """Bad labels, features that are not numbers."""


class MissingDataError(DataError):
    """Files of a data set are neither here nor to be had."""


class ModelError(KinfedError):
    """A model that the engine cannot train."""


class StorageError(KinfedError):
    """A folder, file or disk that cannot be read or written."""


class CheckpointError(KinfedError):
    """A damaged or foreign checkpoint."""


class PoolError(KinfedError):
    """Clients or workers elsewhere are lost, or cannot be reached; resumed later, the run goes on from its last
    checkpoint."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """ConfigError for a name that is not registered, with the nearest registered ones."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")
