"""The files of a run folder, and how each of them is read. The writer is kinfed.records.run_folder; all results of a
run together, for reports, are read by kinfed.records.reader.

config.json is the folder's manifest: the configuration, digests of code and data ("contents"), of the files of a
finished run ("files"), and a "seal" over all of this. It is replaced as a whole, so that no crash leaves it half
written. "files" is there only while nothing is written: a process that takes the run up again removes it first. A
folder of an earlier version has no seal, and is read as it is. The seal finds mistakes and edits; it is no signature,
since anyone can compute it.
"""

from __future__ import annotations

import csv
import hashlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.config import RunConfig, make_config
from kinfed.core import convert, plugins, storage
from kinfed.data import Description
from kinfed.errors import ConfigError, StorageError
from kinfed.records.checkpoint import Checkpoints
from kinfed.records.run_record import TrialKey

if TYPE_CHECKING:
    from torch import Tensor

    from kinfed.algorithms import ServerModels


SEAL = "seal"
JOURNAL = "rounds.jsonl"
SUMMARY = "summary.json"
SEALED_FILES = (
    JOURNAL, "clients.csv", SUMMARY, "model.json", "federation-*.json", "baseline-*.json", "audit.json",
    "curves/*.json", "models/*.safetensors", "deployment.json", "messages.json",
)  # fmt: skip


def sealed(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json with the seal that fits it."""
    content = {name: value for name, value in envelope.items() if name != SEAL}
    return {**content, SEAL: hashlib.sha256(storage.to_json(content).encode()).hexdigest()}


def file_digest(path: Path) -> str:
    """Digest of a file's bytes; "" if there is none."""
    if not path.is_file():
        return ""
    with storage.storage_errors("read", path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Envelope:
    """Types of what config.json holds, as far as readers rely on them."""

    fingerprint: str
    config: dict[str, Any]
    kinfed: str = ""
    versions: dict[str, str] | None = None
    contents: dict[str, str] | None = None
    files: dict[str, str] | None = None
    continued: list[dict[str, Any]] | None = None
    grown_from: tuple[str, ...] = ()
    seal: str = ""


@dataclass(frozen=True)
class RoundLine:
    """Types of what a line of rounds.jsonl holds, likewise; a method's own figures are its panel's."""

    algorithm: str
    seed: int
    round: int
    fold: int | None = None
    method: dict[str, Any] = field(default_factory=dict)


class RunFolderError(StorageError):
    """A folder that cannot be read as a run."""


@dataclass(frozen=True)
class Models:
    """The models of one algorithm and seed after the last round."""

    personal: Tensor  # [K, P]  what each client would deploy
    took_part: Tensor  # bool [K]  who has taken part in a round; the others have no training of their own
    server: ServerModels | None  # where the server has models of its own

    @property
    def server_model(self) -> Tensor | None:
        """[P] where the server has one model for all clients."""
        return None if self.server is None or self.server.assignment is not None else self.server.models[0]


class JobFiles:
    """Files that every job writes (kinfed.records.job_folder)."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @cached_property
    def envelope(self) -> dict[str, Any]:
        """config.json: {"kinfed", "versions", "fingerprint", "config"}."""
        path = self.path / "config.json"
        if not path.exists():
            raise RunFolderError(f"{self.path} is no run folder: it has no config.json; give the folder of a run")
        envelope = storage.read_json(path)
        if not isinstance(envelope.get("config"), dict) or "fingerprint" not in envelope:
            raise RunFolderError(f"{path} has no fingerprint and config; was it written by kinfed?")
        storage.as_record(Envelope, envelope, str(path))
        if SEAL in envelope and sealed(envelope) != envelope:
            raise RunFolderError(
                f"{path} was changed after kinfed had written it: its seal does not fit. A folder holds one run with "
                "one configuration; restore the file, and run what you want to change in another folder (--out)"
            )
        return envelope

    def changed_files(self, names: Iterable[str] | None = None) -> list[str]:
        """Files of a finished run, among these or all, that are gone or not as the run has left them."""
        digests: dict[str, str] = self.envelope.get("files") or {}
        names = digests if names is None else [name for name in names if name in digests]
        changed = [name for name in names if file_digest(self.path / name) != digests[name]]
        # Unless the run was taken up again since config.json was read: then they are being written.
        return changed if changed and JobFiles(self.path).envelope.get("files") == digests else []

    def unchanged(self, name: str) -> Path:
        """The path of a file that is as a finished run has left it; of an unfinished run, as it is."""
        path = self.path / name
        if path.exists() and self.changed_files([name]):
            again = f", or write it again: kinfed run --out {shlex.quote(str(self.path))} --resume"
            remedy = "" if name == JOURNAL else again  # all else is made from checkpoints
            raise StorageError(f"{path} was changed after the run had ended; restore it{remedy}")
        return path

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as plain values."""
        settings: dict[str, Any] = self.envelope["config"]
        return settings

    @property
    def contents(self) -> dict[str, str]:
        """Digests of data and code."""
        return self.envelope.get("contents") or {}

    @property
    def trusted_settings(self) -> dict[str, Any]:
        """The configuration with plugins only where their files were named in this process and have the recorded code:
        a folder may come from anyone, and making a `RunConfig` of its settings runs their plugins."""
        files = [plugins.admitted(path, code, self.path) for path, code in self._plugins()]
        return self.settings | {"plugins": files} if files else self.settings

    def load_plugins(self) -> list[tuple[Path, str]]:
        """Run the recorded plugins, as far as their code is what was recorded; the user has said that they are to be
        trusted. Gives their files and digests."""
        return [(plugins.load_recorded(path, code, self.path), str(code)) for path, code in self._plugins()]

    def _plugins(self) -> list[tuple[str, str | None]]:
        """Paths of plugins with the digests of their code, if stored."""
        paths = self.settings.get("plugins") or []
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise RunFolderError(f"plugins in {self.path / 'config.json'} are no paths; was it written by kinfed?")
        return [(path, self.contents.get(name)) for path, name in zip(paths, plugins.content_names(paths), strict=True)]


class RunFiles(JobFiles):
    """The files of one run folder, each read when it is asked for."""

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the run before it grew."""
        return tuple(self.envelope.get("grown_from", ()))

    @cached_property
    def config(self) -> RunConfig:
        return make_config(None, self.trusted_settings)

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of the model that the configuration names."""
        options: dict[str, Any] = convert(RunConfig, "model", self._listed("model", dict)).options
        return options

    def label(self, name: str | None) -> str:
        """The algorithm of that label; the only one if none is named."""
        return pick("algorithm", name, list(self._listed("algorithms", dict)))

    def seed(self, number: int | None) -> int:
        """The seed `number`, if the run has it; the first one if none is named."""
        seeds = [str(seed) for seed in self._listed("seeds", list)]
        return int(pick("seed", seeds[0] if number is None else str(number), seeds))

    def _listed(self, name: str, kind: type) -> Any:
        """A setting that every run has, and some of it."""
        value = self.settings.get(name)
        if not isinstance(value, kind) or not value:
            raise RunFolderError(f"{self.path / 'config.json'} names no {name}; was it written by kinfed?")
        return value

    def records(self) -> list[dict[str, Any]]:
        """All complete lines of rounds.jsonl; a last one that is being written, or was cut by a crash, is not there."""
        return [record for _, record in read_journal(self.unchanged(JOURNAL))]

    def description(self, seed: int) -> Description:
        path = self.unchanged(f"federation-{seed}.json")
        return Description.from_json(storage.read_json(path), str(path))

    def layout(self) -> dict[str, Any]:
        """model.json: name of the model, number of parameters, name and shape of each of them in a row."""
        path = self.unchanged("model.json")
        layout = storage.read_json(path, "the layout of a run's models")
        known = _has(layout, model=str, parameters=int, layers=list)
        if not known or not all(isinstance(one, dict) and _has(one, name=str, shape=list) for one in layout["layers"]):
            raise StorageError(f"{path} does not say model, parameters and layers; was it written by kinfed?")
        return layout

    @property
    def buffers_path(self) -> Path:
        """File of the tensors that modules have besides parameters, once per run."""
        return self.path / "models" / "buffers.safetensors"

    def buffers(self) -> dict[str, Tensor]:
        """Tensors of a module besides its parameters."""
        path = self.unchanged(self.buffers_path.relative_to(self.path).as_posix())
        return storage.read_tensors(path) if path.exists() else {}

    def models(self, algorithm: str, seed: int) -> Models:
        path = models_path(self.path, algorithm, seed)
        if self.settings.get("folds") is not None:
            raise ConfigError(
                f"{self.path} is a cross-validation, which measures and keeps no models: each has not seen some rows; "
                "run without folds"
            )
        if not path.exists():
            stored = ", ".join(sorted(file.stem for file in path.parent.glob("*.safetensors"))) or "none"
            raise StorageError(f"{self.path} has no models of {algorithm} with seed {seed}; stored: {stored}")
        from kinfed.algorithms import ServerModels  # with torch, which readers of figures alone do not need

        tensors = storage.read_tensors(self.unchanged(path.relative_to(self.path).as_posix()))
        if lacking := {"personal", "took_part"} - tensors.keys():
            raise StorageError(f"{path} has no {min(lacking)}; was it written by this version of kinfed?")
        server, assignment = tensors.get("server"), tensors.get("assignment")
        if server is not None and assignment is None:
            server = server[None]
        models = None if server is None else ServerModels(server, assignment)
        return Models(tensors["personal"], tensors["took_part"], models)

    @property
    def is_finished(self) -> bool:
        """Whether all of the run is done: the summary is written last."""
        return (self.path / SUMMARY).exists()

    def final_state(self, name: str, last: int) -> dict[str, Tensor]:
        """The checkpoint of a part of the run after its last round."""
        if self.settings.get("folds") is not None:
            raise ConfigError(f"{self.path} is a cross-validation, whose models cannot be continued; run without folds")
        own, earlier = self.envelope["fingerprint"], self.earlier_fingerprints
        snapshot = Checkpoints(self.path / "checkpoints", own, earlier=earlier).latest(name)
        if snapshot is None or snapshot.round < last:
            progress = "has not begun" if snapshot is None else f"has reached round {snapshot.round} of {last}"
            raise ConfigError(f"{name} {progress}; finish the run first: kinfed run --out {self.path} --resume")
        return snapshot.tensors


def models_path(folder: Path, algorithm: str, seed: int) -> Path:
    return folder / "models" / (storage.file_name(f"{algorithm}-{seed}") + ".safetensors")


def _has(record: Mapping[str, Any], **kinds: type) -> bool:
    """Whether a record has values of these kinds."""
    return all(isinstance(record.get(name), kind) for name, kind in kinds.items())


def pick(kind: str, name: str | None, names: list[str]) -> str:
    """`name`, if it is among `names`; the only one by default."""
    if name is None:
        if len(names) > 1:
            raise ConfigError(f"the run has several; choose one with --{kind}: {', '.join(names)}")
        return names[0]
    if name not in names:
        raise ConfigError(f"the run has no {kind} {name!r}; it has {', '.join(names)}")
    return name


# ---- the journal ----


def client_number(names: list[str], client: str | int) -> int:
    """The number of a client that is given by number or by name."""
    if isinstance(client, int):
        if not 0 <= client < len(names):
            raise ConfigError(f"clients are numbered 0..{len(names) - 1}; got {client}")
        return client
    if client in names:
        return names.index(client)
    first = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise ConfigError(f"no client is called {client!r}; there are {first}")


def client_rows(path: Path) -> Iterator[tuple[int, dict[str, str] | None]]:
    """The lines of clients.csv, each with its number; None for one with more or fewer cells than the header."""
    with storage.storage_errors("read", path), path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            if missing := {"algorithm", "seed", "client", "n_train", "n_test"} - set(reader.fieldnames or ()):
                raise RunFolderError(f"{path} lacks the columns {', '.join(sorted(missing))}")
            for row in reader:
                yield reader.line_num, None if None in row or None in row.values() else row
        except csv.Error as error:
            raise RunFolderError(f"{path}, line {reader.line_num}: {error}; restore the file") from None


def trial_key(record: Mapping[str, Any]) -> TrialKey:
    return record["algorithm"], record["seed"], record.get("fold")


def read_journal(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Lines of rounds.jsonl and what they say, without a last one that is cut; a damaged one before it is an error."""
    with storage.storage_errors("read", path):
        text = path.read_bytes() if path.exists() else b""
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            record = storage.parse_json(line)
            storage.as_record(RoundLine, record, "")
        except (ValueError, StorageError):
            if number == len(lines):
                break
            raise StorageError(
                f"{path} is damaged: line {number} of {len(lines)} is not a round; restore the file, "
                "or delete that line if you can do without it"
            ) from None
        entries.append((line, record))
    return entries
