"""What a node tells the server of its errors: never a text that may quote the client's examples.

Whoever chooses the settings of a run could read a column value by value otherwise: name it as the label, and be told
which class is unknown. Sentences about settings, messages, files and rules name none and are sent as they are, because
an operator can act on them. Of all other errors the server learns the kind; the text is in the node's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kinfed.deploy.transport.wire import MessageError
from kinfed.errors import ConfigError, KinfedError, ModelError, StorageError

_WITHOUT_EXAMPLES = (ConfigError, MessageError, ModelError, StorageError)
_LOG = logging.getLogger("kinfed.node")


class Withheld(KinfedError):
    """An error at a node whose text stays there."""


@contextmanager
def withheld_errors(clients: str) -> Iterator[None]:
    """Around all that a node computes for an answer of these clients."""
    try:
        yield
    except _WITHOUT_EXAMPLES:
        raise
    except Exception as error:
        _LOG.exception("no answer for %s", clients)
        raise Withheld(
            f"{type(error).__name__} at {clients}; its text may quote examples and is in the node's own log"
        ) from None
