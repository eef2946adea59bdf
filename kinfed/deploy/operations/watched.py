"""A node and a server as health, metrics and alerts see them: from files that are there anyway. One that hangs, or has
died, is reported as such by readers of its files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kinfed.core import storage
from kinfed.deploy.operations import checks
from kinfed.deploy.operations.audit_log import TRANSFERS, AuditLog
from kinfed.deploy.operations.checks import WARNING, WRONG, Condition
from kinfed.deploy.operations.metrics_text import Sample, Tally
from kinfed.deploy.server.status import ENDED, STALE_SECONDS, STOPPED, Progress, Status, read_progress, read_status
from kinfed.errors import KinfedError
from kinfed.version import __version__

NEARLY_SPENT = 0.9  # of an epsilon
AWAITED_SECONDS = 900.0  # after which a site that is awaited is a trouble


@dataclass
class Watched:
    """What a node and a server have in common."""

    side: str  # "node" or "server"
    heartbeat: Path
    folder: Path  # of the vault, or of the server's database
    certificates: Mapping[Path, str] = field(default_factory=dict)  # and what to do when they expire

    def samples(self) -> Iterator[Sample]:
        yield Sample("kinfed_info", 1, {"version": __version__, "side": self.side})
        record = checks.read_service(self.heartbeat) or {}
        for name, program in record.get("programs", {}).items():
            yield Sample("kinfed_program_up", float(bool(program.get("runs"))), {"program": name})
            yield Sample("kinfed_program_starts_total", float(program.get("starts", 0)), {"program": name})
        if "tasks" in record:
            yield Sample("kinfed_tasks_total", float(record["tasks"]), {})
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        yield Sample("kinfed_disk_free_bytes", shutil.disk_usage(there).free, {})

    def conditions(self) -> Iterator[Condition]:
        yield from checks.service(self.heartbeat)
        yield checks.disk(self.folder)
        for path, renewal in self.certificates.items():
            yield checks.certificate(path, renewal)


@dataclass
class WatchedNode(Watched):
    logs: Mapping[str, Path] = field(default_factory=dict)  # audit logs by client
    _tallies: dict[str, Tally] = field(default_factory=dict)

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        for tally in self._updated():
            yield from tally.samples()

    def conditions(self) -> Iterator[Condition]:
        yield from super().conditions()
        try:
            for tally in self._updated():
                for (client, rows), (spent, limit) in tally.epsilon.items():
                    yield from nearly_spent(f"{client}, {rows}", spent, limit)
        except KinfedError as error:
            yield Condition("audit log", WRONG, str(error), "kinfed audit verify says where; restore it from a copy")

    def _updated(self) -> list[Tally]:
        for client, path in self.logs.items():
            self._tallies.setdefault(client, Tally(AuditLog(path))).update()
        return list(self._tallies.values())


@dataclass
class WatchedServer(Watched):
    """Runs are known by the notes in `notes` (kinfed.deploy.programs.unfinished_runs), also when they have ended."""

    notes: Path = Path()
    members: Path | None = None
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    _tallies: dict[Path, Tally] = field(default_factory=dict)

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        for out, status, progress in self.runs():
            about = {"run": out.name}
            tally = self._tallies.setdefault(out, Tally(AuditLog(out / TRANSFERS)))
            tally.update()
            yield Sample("kinfed_run_state", 1, {**about, "state": status.state, "method": status.method})
            yield Sample("kinfed_rounds_total", progress.rounds, about)
            yield Sample("kinfed_rounds_planned", status.rounds, about)
            yield Sample("kinfed_round_seconds", progress.seconds, about)
            for direction, nbytes in (("down", progress.bytes_down), ("up", progress.bytes_up)):
                yield Sample("kinfed_run_bytes_total", nbytes, {**about, "direction": direction})
            yield Sample("kinfed_status_age_seconds", status.age, about)
            yield from self._site_samples(status, about)
            for spent, limit in status.budgets(progress):
                yield Sample("kinfed_epsilon_spent", spent, {**about, "of": "run"})
                yield Sample("kinfed_epsilon_left", max(limit - spent, 0.0), {**about, "of": "run"})
            # Where the choice of clients is secret, who was asked is, too.
            yield from tally.samples(**about) if not status.secret_choice else ()

    def _site_samples(self, status: Status, about: Mapping[str, str]) -> Iterator[Sample]:
        sites = status.clients.values()
        yield Sample("kinfed_sites", len(status.clients), about)
        yield Sample("kinfed_sites_connected", sum(bool(site["connected"]) for site in sites), about)
        for name, site in status.clients.items():
            yield Sample("kinfed_site_connected", float(bool(site["connected"])), {**about, "site": name})
        if status.secret_choice:
            return
        yield Sample("kinfed_sites_awaited", sum(site["awaited_since"] is not None for site in sites), about)
        for name in status.clients:
            yield Sample("kinfed_site_awaited_seconds", self._awaited(status, name), {**about, "site": name})

    def _awaited(self, status: Status, name: str) -> float:
        since = status.clients[name]["awaited_since"]
        if since is None or status.state in ENDED:
            return 0.0
        return max((self.wall() - datetime.fromisoformat(since)).total_seconds(), 0.0)

    def conditions(self) -> Iterator[Condition]:
        yield from super().conditions()
        if self.members is not None:
            yield from checks.members(self.members)
        for out, status, progress in self.runs():
            again = f"flwr run again, with the same out; {out / 'log.txt'} says more"
            if status.state == STOPPED:
                yield Condition(f"run {out.name}", WRONG, f"stopped: {status.reason}", again)
            elif status.state not in ENDED and status.age > STALE_SECONDS:
                text = f"its part at the server has not written for {status.age:.0f} s"
                yield Condition(
                    f"run {out.name}", WRONG, text, "it is started again where it has died; else: flwr list"
                )
            elif not status.secret_choice:
                for name in status.clients:
                    if (seconds := self._awaited(status, name)) > AWAITED_SECONDS:
                        text = f"{name} has been awaited for {seconds / 60:.0f} min"
                        yield Condition(
                            f"run {out.name}", WARNING, text, f"ask the site: kinfed deploy doctor; {again}"
                        )
            for spent, limit in status.budgets(progress):
                yield from nearly_spent(f"run {out.name}", spent, limit)

    def runs(self) -> Iterator[tuple[Path, Status, Progress]]:
        """Runs that this server has begun, with what their folders say."""
        for note in sorted(self.notes.glob("*.json"), key=lambda path: path.name.rpartition("-")[2]):
            try:
                out = Path(str(storage.read_json(note)["out"]))
                status = read_status(out)
                if status is not None:
                    yield out, status, read_progress(out)
            except (KinfedError, LookupError, OSError):
                continue  # removed, or just being written


def nearly_spent(whose: str, spent: float, limit: float) -> Iterator[Condition]:
    if spent >= NEARLY_SPENT * limit:
        advice = "when it is spent, requests that cost are refused; only the owner can allow more"
        yield Condition("epsilon", WARNING, f"{whose}: {spent:.3g} of {limit:g} is spent", advice)
