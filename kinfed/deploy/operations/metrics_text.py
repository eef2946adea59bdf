"""Metrics in the text format of Prometheus. No metric counts rows of a client: what an owner hides is hidden here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from kinfed.deploy.operations.audit_log import REFUSED, AuditLog

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HELP = {  # by name: type and text
    "kinfed_info": ("gauge", "One; the labels say version and side."),
    "kinfed_program_up": ("gauge", "Whether a program of the service runs."),
    "kinfed_program_starts_total": ("counter", "Starts of a program since the service began."),
    "kinfed_tasks_total": ("counter", "Messages (node) or runs (server) that the warm worker has taken."),
    "kinfed_disk_free_bytes": ("gauge", "Room on the disk of vault or runs."),
    "kinfed_messages_total": ("counter", "Messages by event: sent and came (server), left (node)."),
    "kinfed_bytes_total": ("counter", "Bytes of tensors in these messages."),
    "kinfed_refusals_total": ("counter", "Requests that were answered with a refusal or an error."),
    "kinfed_last_message_timestamp_seconds": ("gauge", "Time of the last message."),
    "kinfed_epsilon_spent": ("gauge", "Epsilon, where a limit is set: of rows or client (node), of the run (server)."),
    "kinfed_epsilon_left": ("gauge", "The limit less what was spent."),
    "kinfed_run_state": ("gauge", "One; the label state is waiting, running, done or stopped."),
    "kinfed_rounds_total": ("counter", "Rounds that a run has finished."),
    "kinfed_rounds_planned": ("gauge", "Rounds that a run will have."),
    "kinfed_round_seconds": ("gauge", "Mean seconds of the last five rounds."),
    "kinfed_run_bytes_total": ("counter", "Bytes of tensors in finished rounds, down to sites and up from them."),
    "kinfed_sites": ("gauge", "Sites of a run."),
    "kinfed_sites_connected": ("gauge", "Sites that are connected."),
    "kinfed_sites_awaited": ("gauge", "Sites whose answer is awaited."),
    "kinfed_site_connected": ("gauge", "Whether a site is connected."),
    "kinfed_site_awaited_seconds": ("gauge", "For how long a site's answer has been awaited; 0: it is not."),
    "kinfed_status_age_seconds": ("gauge", "Time since the run has written its status."),
}


class Sample(NamedTuple):
    name: str
    value: float
    labels: Mapping[str, str]


def render(samples: Iterable[Sample]) -> str:
    """Samples as text, those of one name together."""
    by_name: dict[str, list[Sample]] = {name: [] for name in _HELP}
    for sample in samples:
        by_name[sample.name].append(sample)
    lines = []
    for name, some in by_name.items():
        if some:
            kind, text = _HELP[name]
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(sample.labels)} {sample.value:.17g}" for sample in some]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


@dataclass
class Tally:
    """Counts of an audit log, which grows: only what is new is read."""

    log: AuditLog
    messages: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # client, kind, event
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # client, event
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)  # client, kind
    epsilon: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)  # by client and rows
    newest: str = ""
    _offset: int = 0

    def update(self) -> None:
        entries, self._offset = self.log.read_from(self._offset)
        for entry in entries:
            self._add(entry)

    def _add(self, entry: Mapping[str, Any]) -> None:
        client, kind, event = (str(entry.get(key, "")) for key in ("client", "kind", "event"))
        self.newest = str(entry.get("time", self.newest))
        if event == REFUSED:
            self.refusals[client, kind] += 1
            return
        self.messages[client, kind, event] += 1
        self.nbytes[client, event] += int(entry.get("bytes", 0))
        for rows, (spent, limit) in entry.get("epsilon", {}).items():
            self.epsilon[client, rows] = float(spent), float(limit)

    def samples(self, **about: str) -> Iterator[Sample]:
        for (client, kind, event), number in self.messages.items():
            yield Sample("kinfed_messages_total", number, {**about, "client": client, "kind": kind, "event": event})
        for (client, event), number in self.nbytes.items():
            yield Sample("kinfed_bytes_total", number, {**about, "client": client, "event": event})
        for (client, kind), number in self.refusals.items():
            yield Sample("kinfed_refusals_total", number, {**about, "client": client, "kind": kind})
        for (client, rows), (spent, limit) in self.epsilon.items():
            yield Sample("kinfed_epsilon_spent", spent, {**about, "client": client, "of": rows})
            yield Sample("kinfed_epsilon_left", max(limit - spent, 0.0), {**about, "client": client, "of": rows})
        if self.newest:
            yield Sample(
                "kinfed_last_message_timestamp_seconds", datetime.fromisoformat(self.newest).timestamp(), about
            )
