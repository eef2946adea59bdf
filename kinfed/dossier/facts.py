"""Facts of a finished run, fit or deployment, for a dossier: plain values, each read or computed from the folder's own
sealed records. The sentences of a dossier are made of these facts and of nothing else.

A folder that is not finished, was changed after its end or has no seal over its files has no dossier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kinfed.analysis import Comparison, client_gains, display_name, gains, single_run
from kinfed.core import storage
from kinfed.data import Description
from kinfed.deploy import Vault
from kinfed.dossier import group_gaps, sent_messages, threats
from kinfed.errors import ConfigError, StorageError
from kinfed.newcomers import FinishedRun
from kinfed.records import JobFiles, RunFiles, RunRecord, load_run
from kinfed.tabular import FitResult, is_fit
from kinfed.version import __version__

FORMAT = 1
RUNS = "runs"  # the folder of a fit that has a run folder for each kind of model
RUN, FIT, DEPLOYMENT, SEARCH = "run", "fit", "deployment", "search"
APART = (DEPLOYMENT, SEARCH)  # rows have stayed at the sites
Facts = dict[str, Any]


def collect_facts(folder: Path | str, by: str | None = None, vaults: Sequence[Path | str] = ()) -> Facts:
    """All facts of a folder. `by` names a column whose groups are compared, `vaults` are folders of nodes whose ledgers
    are read; the vaults of a deployment on one machine (`kinfed deploy up`) are found by themselves."""
    path, vaults = Path(folder), [Path(vault) for vault in vaults]
    if not (path / "config.json").exists() and (path / "run" / "config.json").exists():
        path, vaults = path / "run", vaults or sorted((path / "sites").glob("*/vault"))
    kind, files = kind_of(path), JobFiles(path)
    check_sealed(files)
    envelope = files.envelope
    facts: Facts = {
        "format": FORMAT, "kinfed": __version__, "kind": kind, "by": by,
        "made_with": {
            "kinfed": envelope.get("kinfed"), "versions": envelope.get("versions") or {},
            "continued": [{"kinfed": one.get("kinfed"), "versions": one.get("versions") or {}}
                          for one in envelope.get("continued") or []],
        },
        "identity": {"fingerprint": envelope["fingerprint"], "seal": envelope["seal"], "contents": files.contents,
                     "files": envelope["files"]},
    }  # fmt: skip
    facts |= _of_fit(path, kind) if kind in (FIT, SEARCH) else _of_run(path, kind)
    nodes = [Vault(vault) for vault in vaults]
    facts["transfers"] = sent_messages.transfer_facts(path, nodes) if kind in APART else None
    books = [sent_messages.ledger_facts(vault) for vault in nodes]
    facts["ledgers"] = {client: page for book in books for client, page in book.items()}
    if by is not None:
        facts["gaps"] = _gaps(path, kind, by)
    plain: Facts = storage.plain(facts)
    return plain


def kind_of(folder: Path) -> str:
    """Kind of a folder; ConfigError for one that has no dossier."""
    apart, job = (folder / "deployment.json").exists(), (folder / "config.json").exists()
    if is_fit(folder):
        return SEARCH if apart else FIT
    if job and (folder / "summary.json").exists():
        return DEPLOYMENT if apart else RUN
    if job and any((folder / name).exists() for name in ("describe.json", "evaluate.json")):
        raise ConfigError(f"{folder} holds answers of sites without any training; their page shows all that has left")
    raise ConfigError(
        f"{folder} holds no finished run, fit or deployment, and a dossier is of a finished one; give the folder that "
        "kinfed run, kinfed fit or kinfed deploy has written, and resume it first if it was stopped"
    )


def check_sealed(files: JobFiles) -> None:
    """Refuse a folder that was changed after its end, or whose files nothing stands for."""
    if "seal" not in files.envelope or not files.envelope.get("files"):
        raise StorageError(
            f"{files.path} has no seal over its files: an earlier version wrote it, or it was taken up again and not "
            "finished. Run it once more (--resume)"
        )
    if changed := files.changed_files():
        listed = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise StorageError(f"{listed} in {files.path} changed after the end; restore what kinfed had written")


def file_names(table: str) -> str:
    """Name of a data set, or of files without the folders of this machine."""
    return ", ".join(Path(one).name for one in table.split(", "))


# ---- runs, in one place and apart ----


def _of_run(path: Path, kind: str) -> Facts:
    run, files = load_run(path, path.name), RunFiles(path)
    comparison, config = single_run(run), files.config
    storage.as_record(dict[str, Any], run.config.get("dataset"), f"{path / 'config.json'}, dataset")
    roster = storage.read_json(path / "deployment.json") if kind == DEPLOYMENT else None
    seed = min(run.federations) if roster is None else config.seeds[0]
    about = run.federations[seed] if roster is None else None
    names, sites = _sites(about, roster)
    learnt = roster["preprocessing"] if roster is not None else about.inputs.get("preprocessing") if about else None
    sent = storage.read_json(path / "messages.json") if (path / "messages.json").exists() else {}
    ended = FinishedRun.open(path, seed) if roster is None else None
    methods = []
    for method in comparison.methods:
        trials = list(method.trials)
        algorithm = ended.algorithm(method.algorithm) if ended is not None else None
        fields = (
            sent_messages.fields_of_update(ended, algorithm) if ended is not None and algorithm is not None
            else sent_messages.recorded_fields(sent.get(method.algorithm, {}))
        )  # fmt: skip
        counted = sent_messages.counted_bytes(trials)
        listed = about is None or about.listed is None
        hidden = kind == DEPLOYMENT and config.user_privacy is not None and not config.user_at_nodes
        methods.append({
            "label": method.label, "method": method.family, "title": display_name(method.family), "fields": fields,
            "rounds": max(len(trial.rounds) for trial in trials), "seeds": len(trials), **counted,
            "as_declared": sent_messages.as_declared(counted["bytes_of_one"], fields, config),
            "calls": sent_messages.calls_by_site(config, names, trials) if listed and not hidden else None,
            "hands_on": bool(algorithm is not None and "hands models on" in algorithm.traits),
            "guarantee": _guarantee(method.trials, names, config, bool(fields)),
        })  # fmt: skip
    summary = storage.read_json(path / "summary.json")
    return {
        "title": file_names(str(run.config["dataset"]["name"])) if roster is None else f"{len(names)} sites",
        "seed_of_sites": seed, "sites": sites, "columns": _columns(roster, about),
        "example": list((roster or {}).get("shape") or (about.inputs["shape"] if about else ())),
        "statistics": sent_messages.statistics_bytes(learnt), "methods": methods,
        "evaluations": summary.get("evaluations"), "settings": _settings(run),
        "metric": comparison.metric, "gains": _gains(comparison), "search": None,
    }  # fmt: skip


def _sites(about: Description | None, roster: Mapping[str, Any] | None) -> tuple[list[str], list[Facts]]:
    if about is not None:
        names, counts = (
            list(about.names),
            list(zip(*(about.sizes(one) for one in ("train", "val", "test")), strict=True)),
        )
    else:
        assert roster is not None
        names, counts = list(roster["names"]), [tuple(one) for one in roster["counts"]]
    keys = ("train", "validation", "test")
    return names, [{"name": n, **dict(zip(keys, one, strict=True))} for n, one in zip(names, counts, strict=True)]


def _columns(roster: Mapping[str, Any] | None, about: Description | None) -> list[str]:
    """Names of the columns that sites name, where they have any."""
    if roster is not None:
        return list(roster["columns"])
    learnt = about.inputs.get("preprocessing") if about is not None else None
    return [] if learnt is None else [one["name"] for one in learnt["encodings"]]


def _settings(run: RunRecord) -> Facts:
    """Settings that a reader asks for first; config.json has all."""
    names = ("model", "rounds", "participation", "seeds", "folds", "batch", "steps", "lr", "compress", "robust")
    return {name: run.config[name] for name in names if run.config.get(name) not in (None, {}, "")}


def _guarantee(trials: Sequence[Any], names: Sequence[str], config: Any, sends: bool) -> Facts:
    """Protections of a method, and ε of every site: the largest over the seeds."""
    private, user = config.privacy is not None, config.user_privacy is not None
    mode = threats.mode_of(
        secure=config.secure is not None, private=private, user=user, at_nodes=bool(config.user_at_nodes)
    )
    facts: Facts = {"mode": mode if sends else None, "secure_least": config.secure_least if config.secure else None}
    finals = [trial.final for trial in trials]
    if private and (entries := [one.privacy for one in finals if one.privacy is not None]):
        each = [[entry["epsilon"][k] for entry in entries] for k in range(len(entries[0]["epsilon"]))]
        facts["examples"] = {
            "epsilon": {name: None if None in own else max(own) for name, own in zip(names, each, strict=True)},
            **{name: entries[0][name] for name in ("delta", "noise", "clip", "limit", "not_covered")},
            "refused": sorted({name for entry in entries for name in entry["refused"]}),
        }  # fmt: skip
    if user and (entries := [one.user_privacy for one in finals if one.user_privacy is not None]):
        facts["users"] = entries[0] | {"epsilon": _largest([entry["epsilon"] for entry in entries])}
    return facts


def _largest(values: Sequence[float | None]) -> float | None:
    """The largest; None, which stands for infinity, if any is None."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _gains(comparison: Comparison) -> list[Facts]:
    """Every site's figure alone and by each method in which sites learn with others."""
    every = []
    for method in comparison.methods:
        if method.family == "local" or not (own := gains(comparison, method)):
            continue
        sites = []
        for one in client_gains(own):
            likely = one.likely
            sites.append({
                "site": one.client, "train": one.n_train, "test": one.n_test, "alone": one.alone, "own": one.own,
                "gain": one.gain, "low": likely.low if likely else None, "high": likely.high if likely else None,
            })  # fmt: skip
        every.append({"label": method.label, "seeds": len({one.seed for one in own}), "sites": sites})
    return every


# ---- fits, in one place and apart ----


def _of_fit(path: Path, kind: str) -> Facts:
    record = storage.read_json(path / "fit.json", "the result of kinfed fit")
    FitResult.from_json(record, path)  # which refuses values of other types
    sites = [{"name": one["site"], "train": one["train_rows"], "validation": 0, "test": one["test_rows"]}
             for one in record["sites"]]  # fmt: skip
    config = JobFiles(path).settings
    private = config.get("dp_noise") is not None or config.get("dp_epsilon") is not None
    apart = threats.PRIVATE if private else threats.SEARCH_SECURE if config.get("secure_sum") else threats.SEARCH
    mode = threats.PLAIN if kind == FIT else apart
    settings, taken = record["settings"], {one["chosen"] for one in record["sites"]}
    methods = []
    for one in record["contenders"]:
        if not one["sends"] or (one["name"] not in taken and kind == FIT):
            continue
        rounds, fields, declared = settings["rounds"], sent_messages.named_fields(one["sends"]), None
        if kind == FIT and one["run"]:
            ended = FinishedRun.open(path / RUNS / one["run"])
            fields = sent_messages.fields_of_update(ended, ended.algorithm(one["name"]))
            declared = sent_messages.as_declared(one["bytes_up"], fields, ended.config)
        methods.append({
            "label": one["title"], "method": one["method"], "title": one["title"], "fields": fields, "rounds": rounds,
            "seeds": 1, "answers": rounds * len(sites), "lost": 0, "bytes_of_one": one["bytes_up"],
            "bytes_up": one["bytes_up"] * rounds * len(sites), "bytes_down": None, "as_declared": declared,
            "calls": None, "hands_on": one["hands_on"],
            "guarantee": {"mode": mode, "in_ledgers": private},
        })  # fmt: skip
    searched = None
    if kind == SEARCH:
        lines = [storage.parse_json(line) for line in (path / "rounds.jsonl").read_text("utf-8").splitlines()]
        searched = {
            "runs": len({(line["algorithm"], line["try"], line["fold"]) for line in lines}),
            "rounds": max((line["round"] for line in lines), default=0),
            **{name: sum(line[name] for line in lines) for name in ("bytes_up", "bytes_down")},
        }  # fmt: skip
    shown = ("algorithms", "models", "trials", "folds", "rounds", "steps", "deploy", "test_fraction", "seed")
    return {
        "title": file_names(record["table"]), "seed_of_sites": settings["seed"], "sites": sites, "columns": [],
        "example": [], "statistics": record["statistics_bytes"] * len(sites), "methods": methods, "evaluations": None,
        "settings": {name: settings[name] for name in shown}, "metric": record["metric"], "gains": [],
        "search": searched, "fit": record,
    }  # fmt: skip


def _gaps(path: Path, kind: str, column: str) -> Facts:
    if kind in APART:
        raise ConfigError(
            f"--by {column}: the rows are at the sites, and no figure by {column} has left them. Ask each site, or "
            "make the dossier of a run or a fit in one place"
        )
    return group_gaps.of_fit(path, column) if kind == FIT else group_gaps.of_run(path, column)
