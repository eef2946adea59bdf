"""Searches over sites that share no rows beside fits of the pooled table, on every table with sites that ships.

    python benchmarks/search_equality.py [--tables heart_disease,exam65_london] [--sites 12] [--rows 20000] [--trials 1]
        [--folds 3] [--rounds 5] [--algorithms auto]

Long texts are left out of both: their scores are learnt where all rows are in one place (mdsd_amazon4 has no others).
For every table: sites in this process, with real messages, vaults and gates (tests/loopback.py), search as `kinfed
deploy fit` does; `kinfed fit --deploy chosen` gets the same rows in one table. Splits, choices and settings
must be the same, scores and gains agree to 1e-5, and parameters of the sites' models to 1e-5. Tables with more sites
than `--sites` are tried with that many of them, drawn at random, and those with more rows than `--rows` with so many.
Exits with 1 where a table differs. Minutes to half an hour, by rounds and methods.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from loopback import Loopback

import kinfed
from kinfed.data import Resplit, make_federation
from kinfed.data.sources import SITE_TABLES, Source, TableOptions, site_rows
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.fit_trial import search_target
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.errors import KinfedError
from kinfed.serving import ModelPipeline
from kinfed.tabular import FitResult, FitSettings, load_sites

TABLES = (*(name for name in SITE_TABLES if name != "mdsd_amazon4"), "breast_cancer", "post_offices")
CLOSE = 1e-5
OWN = "rounds of its own"  # in the reason why a method is left out of a search, and not of a fit


def some_rows(table: pa.Table, most: int) -> pa.Table:
    """At most that many rows, drawn at random in their order."""
    if table.num_rows <= most:
        return table
    return table.take(np.sort(np.random.default_rng(0).permutation(table.num_rows)[:most]))


def without_texts(table: pa.Table, options: TableOptions) -> TableOptions:
    """The same, with columns of long texts left out."""
    columns = {name: value for name, value in asdict(options).items() if value is not None}
    learnt = make_federation(load_sites(table, columns, None, 0), "column", None, audit=False).preprocessing
    assert learnt is not None
    kinds = options.kinds | {one.name: "skip" for one in learnt.used if one.kind == "text"}
    return replace(options, columns=",".join(f"{name}={kind}" for name, kind in kinds.items()))


def apart(
    table: pa.Table, options: TableOptions, search: dict[str, Any], folder: Path
) -> tuple[FitResult, dict[str, ModelPipeline], Loopback]:
    """The result of a search over sites that have the rows of a table, each in a file of its own; their models."""
    columns = {name: value for name, value in asdict(options).items() if value is not None}
    source = load_sites(table, columns, None, 0)
    names, owner = (
        list(source.owner_names or ()),
        [str(one).strip() for one in table[options.client_column].to_pylist()],
    )
    rest, nodes = table.drop_columns([options.client_column]), {}
    for place, name in enumerate(names):
        path = folder / f"{place}.parquet"
        pq.write_table(rest.filter(pa.array([one == name for one in owner])), path)
        more = {"ignore": ",".join(options.ignored), "split": options.split_column or ""}
        nodes[100 + place] = {"client": name, "data": str(path), "vault": str(folder / f"vault-{place}"), **more}
    described = {
        name: getattr(options, name) or "" for name in ("label_column", "columns", "time_column", "event_column")
    }
    renamed = {"algorithms": "portfolio", "folds": "search_folds"}
    settings = {renamed.get(name, name): value for name, value in search.items()}
    target = search_target(source.problem) if source.problem.kind != "survival" else known_periods(source)
    net = Loopback({
        "method": "fit", "clients": ",".join(names), "out": str(folder / "run"), "deadline": 60.0, "wait": 60.0,
        **described, **target, **settings,
    }, nodes)  # fmt: skip
    result = FitResult.read(serve(Deployment.parse(net.run_config), net, net.log.append, **net.time))
    models = {node["client"]: ModelPipeline.read(Vault(node["vault"]).model_path()) for node in nodes.values()}
    return result, models, net


def known_periods(source: Source) -> dict[str, Any]:
    """The target of a search on survival, whose periods and hazards everybody has to know: those of a pooled fit."""
    share = {"test_fraction": FitSettings().test_fraction}
    pooled = make_federation(source, "column", None, share, 0, resplit=Resplit(), audit=False)
    return {"target": json.dumps(pooled.problem.to_json()), "classes": "2"}


def parameters(pipeline: ModelPipeline, rows: pa.Table) -> torch.Tensor:
    """All parameters; of a model that carries a variance, whose root is one of many, its size for some rows instead."""
    tensors = pipeline.module.state_dict()
    if hasattr(pipeline.module, "uncertainty"):
        tensors = {name: tensor for name, tensor in tensors.items() if name != "extra"}
        known = pipeline.module.uncertainty(pipeline.transform(rows)) or ()
        tensors |= {str(place): one for place, one in enumerate(known) if isinstance(one, torch.Tensor)}
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()])


def differences(
    ours: FitResult, models: dict[str, ModelPipeline], pooled: FitResult, rows: pa.Table
) -> tuple[list[str], float, float]:
    """What differs, the largest difference of a score or gain, and that of a parameter."""
    wrong, figure, weight = [], 0.0, 0.0
    left_out = {name for name, reason in ours.left_out.items() if OWN not in reason}
    if left_out != pooled.left_out.keys():
        wrong.append(
            f"left out: {[(name, ours.left_out[name][:200]) for name in left_out]} and {sorted(pooled.left_out)}"
        )
    theirs = {one.name: one for one in pooled.contenders}
    for one in ours.contenders:
        other = theirs[one.name]
        if (one.network, one.options) != (other.network, other.options):
            wrong.append(f"{one.name} has other settings")
        pairs = ((one.validation, other.validation), (one.mean, other.mean), (one.spread, other.spread))
        figure = max([figure, *(abs(a - b) / max(1.0, abs(b)) for a, b in pairs if np.isfinite(b))])
    for one, other in zip(ours.sites, pooled.sites, strict=True):
        for name in ("site", "train_rows", "validated_rows", "test_rows", "chosen", "together"):
            if getattr(one, name) != getattr(other, name):
                wrong.append(f"{one.site}: {name} {getattr(one, name)} and {getattr(other, name)}")
        a, b = one.gain.value, other.gain.value
        if (a is None or np.isnan(a)) != (b is None or np.isnan(b)):
            wrong.append(f"{one.site}: gain {a} and {b}")
        elif a is not None and b is not None and np.isfinite(b):
            figure = max(figure, abs(a - b) / max(1.0, abs(b)))
        if one.chosen == other.chosen:
            mine, wanted = (parameters(model, rows) for model in (models[one.site], pooled.model(other.site)))
            weight = max(weight, float(((mine - wanted).abs() / wanted.abs().clamp_min(1.0)).max()))
    return wrong, figure, weight


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--sites", type=int, default=12)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--models", default="mlr")
    parser.add_argument("--algorithms", default="auto")
    chosen = parser.parse_args()
    search = {name: getattr(chosen, name) for name in ("trials", "folds", "rounds", "steps", "models", "algorithms")}
    torch.set_num_threads(1)
    print(f"load at the start: {os.getloadavg()[0]:.1f}; {search}", flush=True)
    print(
        "| table | sites | rows | methods | round trips | figures differ by | parameters differ by | s apart | pooled |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    failed = 0
    for name in chosen.tables.split(","):
        table, options = site_rows(name, {})
        if len(set(table[options.client_column].to_pylist())) > chosen.sites:
            table, options = site_rows(name, {"sites": chosen.sites})
        table = some_rows(table, chosen.rows)
        options = without_texts(table, options)
        with tempfile.TemporaryDirectory() as folder:
            try:
                began = time.process_time()
                ours, models, net = apart(table, options, search, Path(folder))
                middle = time.process_time()
                columns = {key: value for key, value in asdict(options).items() if value is not None}
                methods = [one.method for one in ours.contenders] + [
                    name for name, reason in ours.left_out.items() if OWN not in reason
                ]
                same = search | {"algorithms": ",".join(dict.fromkeys(methods))}
                pooled = kinfed.fit(table, deploy="chosen", references=False, accept="all", **columns, **same)
                ended = time.process_time()
            except KinfedError as error:
                failed += 1
                print(f"| {name} | {type(error).__name__}: {error} |", flush=True)
                continue
        wrong, figure, weight = differences(ours, models, pooled, table.slice(0, 50))
        trips = next(line for line in reversed(net.log) if "round trips" in line).split(";")[1].split()[0]
        bad = bool(wrong) or not figure <= CLOSE or not weight <= CLOSE
        failed += bad
        methods = len({one.method for one in ours.contenders})
        print(
            f"| {name} | {len(ours.sites)} | {table.num_rows:,} | {methods} | {trips} "
            f"| {figure:.1e} | {weight:.1e} | {middle - began:.0f} | {ended - middle:.0f} |"
            + "".join(f"\n  differs: {one}" for one in wrong[:6]),
            flush=True,
        )
    print(f"load at the end: {os.getloadavg()[0]:.1f}; {failed} of {len(chosen.tables.split(','))} tables differ")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
