"""A client's part in a search (method = "fit"): many runs on its own rows, judged at home.

A message carries the requests of all runs: of every try of every method, with the training rows outside of each fold
and, as the last part, with all of them. The states of all of them are one file in the vault, replaced as a whole once
the message is done, so that a message that comes again is answered as before.

    what leaves                rule                                                                     in
    statistics of columns      as for any run, of the training rows of every part; sums of a target     sums
    updates                    those of the runs' methods                                               train
    two numbers per try        sums of a proper score over validated rows, and their number             judge
    advantages of methods      over learning alone there, with the chosen tries, and their covariance   weigh
    the gain on test rows      with its interval, of what the site takes; what columns buy there that   settle
                               not every site has

The last message brings what the site takes. The model and a page with all of the site's figures stay in the vault.

Under differential privacy (dp_noise, dp_epsilon) every run is private and has its price in the ledger, update by
update; before the first of them all that the search will cost is held against the owner's epsilon. Columns are learnt
from all training rows at once, if the owner gives such sums; figures of tries are sums of bounded losses with the
owner's noise, at a price; the gain on test rows stays.

Under secure sums (secure_sum) updates leave masked, each run's in a sum of its own that all sites are in; all else
leaves as it does without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms import deployed_models
from kinfed.core import Nothing, storage
from kinfed.data import SPLITS, Federation, ValueMoments
from kinfed.deploy.node.gate import LARGEST_LOSS, Noise, at_rate
from kinfed.deploy.node.gated_requests import gated_request
from kinfed.deploy.node.node import NodeClient, asked_server_model
from kinfed.deploy.node.node_data import ClientData, load_client_data
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.private_figures import FIGURES, ONE_ANSWER, SEARCHED, PrivateFigures
from kinfed.deploy.node.requests import Preparation, enrolment_of, prepare, stored_state
from kinfed.deploy.node.search_states import MODELS, KeptRuns, SearchRunEntry
from kinfed.deploy.node.vault_entry import MODEL, VaultEntry
from kinfed.deploy.settings import FIT, Deployment
from kinfed.deploy.transport import wire
from kinfed.deploy.transport.wire import MessageError, Packet
from kinfed.engine import Metric
from kinfed.privacy import EVALUATION, Events, merge, planned_costs, recorded
from kinfed.runs import build_task
from kinfed.serving import ModelPipeline
from kinfed.tabular import (
    ContenderRecord,
    HomeSearch,
    contenders_of,
    methods_of,
    outputs_of_rows,
    site_result,
    write_page,
)  # fmt: skip

if TYPE_CHECKING:
    from kinfed.deploy.secure.secure_session import SecureSession

MOST_FOLDS = 100


class FitClient(NodeClient):
    """Lives for one message."""

    def __init__(self, settings: NodeSettings, deployment: Deployment) -> None:
        super().__init__(settings, deployment)
        assert deployment.search is not None
        self.search = deployment.search
        self.kept: KeptRuns | None = None
        self.results: dict[str, Tensor] = {}  # outputs and models of this message
        self._runs: dict[str, RunClient] = {}
        self._home: HomeSearch | None = None
        self._prepared: dict[str, Federation] = {}

    @cached_property
    def own(self) -> ClientData:
        own = load_client_data(self.settings, self.deployment)
        if self.is_private and own.roles is None and not own.names_rows(self.deployment):
            rows = {name: own.federation.split(name).rows for name in SPLITS}
            return replace(own, roles=storage.checksum(rows))  # of the whole search: its parts divide training rows
        return own

    def home(self, order: Packet) -> HomeSearch:
        folds = order.require("folds", int)
        if not 2 <= folds <= MOST_FOLDS:
            raise MessageError(f"a search has 2 to {MOST_FOLDS} folds; the message says {folds}")
        if self._home is None or self._home.folds != folds:
            self._home = HomeSearch.of(self.own.federation, folds, self.deployment.seed)
        return self._home

    @property
    def is_private(self) -> bool:
        return self.deployment.run.privacy is not None

    def part(self, order: Packet) -> ClientData:
        """The client's rows in the part of the search that an order is of."""
        home, number = self.home(order), order.require("part", int)
        if not 0 <= number <= home.folds:
            raise MessageError(f"the parts of a search in {home.folds} folds are 0 to {home.folds}; got {number}")
        train, test = home.part(number)
        problem = self.deployment.problem_of(order.header.get("problem"))
        return replace(self.own, federation=replace(self.own.federation, train=train, test=test, problem=problem))

    def fitted_home(self, order: Packet) -> HomeSearch:
        """The search at home with the problem as fitted to the rows of all sites."""
        home = self.home(order)
        return replace(home, data=replace(home.data, problem=self.part(order).federation.problem))

    def prepared(self, order: Packet, deployment: Deployment) -> tuple[ClientData, Federation]:
        """These rows, raw and as the runs of a part are fed them."""
        own = self.part(order)
        key = json.dumps([order.header["part"], order.header.get("problem"), deployment.validation_share])
        if key not in self._prepared:
            self._prepared[key] = own.prepared(enrolment_of(order), deployment)
        return own, self._prepared[key]

    # ---- messages ----

    def answer(self, kind: str, order: Packet) -> Packet:
        self.gate.check_search()
        if kind == wire.SUMS:
            return self.statistics(order)
        if kind in (wire.TRAIN, wire.EVALUATE, *wire.SECURE_KINDS):
            return self.run_of(order).answer(kind, order)
        answers = {wire.JUDGE: self.judge, wire.WEIGH: self.weigh, wire.SETTLE: self.settle}
        if kind not in answers:
            raise MessageError(f"a request of kind {kind}, which no search makes")
        return answers[kind](order)

    @contextmanager
    def together(self, orders: Sequence[Packet]) -> Iterator[None]:
        """Read the states of all runs for the requests of a message, and keep new ones in one go before any answer
        leaves. A run that has all it needs is not asked any more, and its state stays as it is."""
        of_runs = [order for order in orders if order.header.get("kind") in (wire.TRAIN, wire.EVALUATE)]
        if of_runs:
            accepted = max(order.require("accepted", int) for order in of_runs)
            entry = self.vault.entry(of_runs[0].require("run", str), self.name)
            self.kept = KeptRuns(entry, of_runs[0].require("round", int), accepted)
            self.kept.open()
            new = [order for order in of_runs if order.header["kind"] == wire.TRAIN and not order.header["accepted"]]
            if self.is_private and new:
                self._hold_plan(new)
        with self.gate.counted_together():
            yield
            if self.kept is not None:
                self.kept.close(self.results)

    def rate(self, order: Packet, batch: int) -> float:
        """The chance of a row to be in a sample, in the part with the fewest training rows."""
        home = self.home(order)
        fewest = min(int(home.part(number)[0].count[0]) for number in range(home.folds + 1))
        return min(batch / max(fewest, 1), 1.0)

    def _hold_plan(self, orders: Sequence[Packet]) -> None:
        """Hold all that runs which begin with these orders will cost against the owner's epsilon."""
        total: Events = ()
        for order in orders:
            algorithm = self.run_of(order).algorithm
            rounds, (after,) = planned_costs(algorithm, self.part(order).federation.train.count)
            each, rate = () if rounds is None else rounds[0], self.rate(order, algorithm.training.batch)
            whole = merge(merge((), each, algorithm.rounds_in(self.search.rounds)), after)
            total = merge(total, at_rate(whole, rate))
        self.gate.hold_plan(orders[0].require("noise", float), total, FIGURES)

    def run_of(self, order: Packet) -> RunClient:
        """The client in one of the runs of the search, as settings make it: a server names runs and defines none."""
        number, method = order.require("try", int), order.require("method", str)
        methods = methods_of(self.search.algorithms, order.require("num_clients", int), self.deployment.problem.kind)
        if method not in methods or not 0 <= number < self.search.trials:
            raise MessageError(f"try {number} of {method[:40]} is no run of this search")
        record = order.header.get("problem")
        key = json.dumps([number, method, record])
        if key not in self._runs:
            chosen = self.deployment.make_try(number, method, order.require("num_clients", int))
            self._runs[key] = RunClient(self, self.deployment.of_try(chosen, record))
        return self._runs[key]

    def statistics(self, order: Packet) -> Packet:
        """Statistics of the columns, sums of the target and numbers of rows, of every part."""
        self.gate.check_sums()
        home, own = self.home(order), self.own
        if own.table is None:
            raise Refused(f"a search takes a table with columns, and the data of {self.name} are none")
        parts, whole = [], own.statistics() if self.is_private else None
        for number in range(home.folds + 1):
            train, test = home.part(number)
            data = replace(own, federation=replace(own.federation, train=train, test=test))
            statistics = data.statistics() if whole is None else whole
            self.gate.check_categories(statistics.columns_with_categories)
            divided = data.federation.with_validation(self.deployment.common_validation, self.deployment.seed)
            parts.append({
                "statistics": statistics.to_json(), "target": asdict(target_moments(data.federation)),
                "counts": row_counts(data.federation), "validated": row_counts(divided),
            })  # fmt: skip
        return self.gate.release(wire.SUMS, Packet({"name": self.name, "parts": parts}), "statistics of columns")

    def judge(self, order: Packet) -> Packet:
        """Figures of all tries, from the outputs that came with the same message."""
        home, metric = self.fitted_home(order), self._metric()
        outputs = {}
        for name, number in self._tried():
            parts = [self.results.get(_key("fold", name, number, fold)) for fold in range(home.folds)]
            if any(part is None for part in parts):
                continue
            joined = home.joined([part for part in parts if part is not None])
            if joined is not None:
                outputs[name, number] = joined
                self.results[_key("validated", name, number)] = joined
        for name in [name for name in self.results if name.startswith("fold/")]:
            del self.results[name]
        if self.is_private:
            return self._at_price(wire.JUDGE, order, home, outputs)
        figures = home.figures(metric, outputs)
        record = [[name, number, *sums] for (name, number), sums in figures.items()]
        header = self._reply_header(order) | {"figures": record}
        return self.gate.release(wire.JUDGE, Packet(header), "two numbers per try", order.require("run", str))

    def _at_price(self, kind: str, order: Packet, home: HomeSearch, outputs: Mapping[Any, Tensor]) -> Packet:
        """Figures of these models on validated rows, with noise and a price."""
        losses = {one: home.bounded_losses(output, LARGEST_LOSS) for one, output in outputs.items()}
        private, entry = PrivateFigures(losses), self.vault.entry(order.require("run", str), self.name)

        def noised(noise: Noise) -> Packet:
            if kind == wire.JUDGE:
                return Packet(self._reply_header(order) | {"figures": private.figures(noise)})
            advantages = private.advantages(noise, self.settings.rules.evaluation_noise)
            return Packet(self._reply_header(order), {"advantages": advantages})

        data = {"losses": [storage.checksum({"losses": one}) for one in losses.values()]}
        return self.gate.at_price(kind, order, entry, ONE_ANSWER, noised, data=data)

    def _tried(self) -> list[tuple[str, int]]:
        names = {tuple(name.split("/")[1:3]) for name in self.results if name.startswith("fold/")}
        return sorted((name, int(number)) for name, number in names)

    def weigh(self, order: Packet) -> Packet:
        home, stored = self.fitted_home(order), self._stored(order)
        outputs = {name: stored[_key("validated", name, number)] for name, number in self._best(order).items()}
        replicates = order.require("replicates", int)
        if not 100 <= replicates <= 1000:
            raise MessageError(f"a bootstrap has 100 to 1000 replicates; the message says {replicates}")
        if self.is_private:
            return self._at_price(wire.WEIGH, order, home, outputs)
        seen, covariance = home.advantages(self._metric(), outputs, order.require("number", int), replicates)
        groups = {"advantages": {"seen": torch.from_numpy(seen), "covariance": torch.from_numpy(covariance)}}
        return self.gate.release(
            wire.WEIGH, Packet(self._reply_header(order), groups), "advantages of methods", order.require("run", str)
        )

    def settle(self, order: Packet) -> Packet:
        """Keep what the site takes, write its page, and say what its test rows show."""
        stored, best, home = self._stored(order), self._best(order), self.fitted_home(order)
        entry = self.vault.entry(order.require("run", str), self.name)
        contenders = [
            ContenderRecord(**{**one, "sends": tuple(one["sends"])}) for one in order.require("contenders", list)
        ]
        test, validated = (
            {name: stored[_key(what, name, number)] for name, number in best.items()} for what in ("test", "validated")
        )
        validated = {name: outputs[home.places] for name, outputs in validated.items()}
        settings = replace(self.search, folds=home.folds)
        _, prepared = self.prepared(order, self.deployment)
        own = [] if prepared.preprocessing is None else prepared.preprocessing.own
        outcome = site_result(
            home, contenders, order.header, test, validated, settings, order.require("number", int), own
        )
        taken = outcome.taken
        with entry.locked():
            self._keep_taken(entry, order, taken, best[taken], stored[_key("theta", taken, best[taken])])
            notes = (SEARCHED,) if self.is_private else ()
            write_page(replace(outcome.result, notes=notes), entry.folder)
        site = outcome.result.sites[0]
        header = self._reply_header(order) | {
            "taken": taken, "rows": [site.train_rows, site.validated_rows, site.test_rows],
            "test_gain": [None if np.isnan(number) else number for number in outcome.test_gain],
            "gain": asdict(outcome.gain), "gain_chosen": asdict(outcome.gain_chosen),
            "own_columns": [[one.name, one.held, one.gain, one.gain_error] for one in own],
        }  # fmt: skip
        if self.is_private:  # test rows are told of on the site's own page alone
            nothing = dict.fromkeys(header["gain"])
            header |= {"test_gain": [None, None], "gain": nothing, "gain_chosen": nothing}
        return self.gate.release(wire.SETTLE, Packet(header), "its gain on test rows", entry.run)

    def _keep_taken(self, entry: VaultEntry, order: Packet, taken: str, number: int, theta: Tensor) -> None:
        method = next(m for m in self._methods(order) if taken in {one.name for one in contenders_of(m)})
        chosen = self.deployment.make_try(number, method, order.require("num_clients", int))
        client = RunClient(self, self.deployment.of_try(chosen, order.header.get("problem")))
        enrolment = enrolment_of(order)
        own = self.part(order)
        data = own.prepared(enrolment, client.deployment)
        task = build_task(client.run, data.features.shape, client.deployment.problem)
        prepared = Preparation(
            wire.SETTLE, order, self.settings, client.deployment, own, enrolment, data, task, Nothing()
        )
        client.keep_model(entry, prepared, theta, order.require("round", int))
        if self.is_private:  # states of its runs are apart, and a vault lists what has one
            entry.keep(order.require("round", int), {"theta": theta}, 0, FIT)
        path = entry.folder / "models" / "sites" / f"{storage.file_name(self.name, any_letters=True)}.safetensors"
        storage.make_folder(path.parent)
        ModelPipeline.read(entry.folder / MODEL).save(path)

    def _methods(self, order: Packet) -> tuple[str, ...]:
        return methods_of(self.search.algorithms, order.require("num_clients", int), self.deployment.problem.kind)

    def _metric(self) -> Metric:
        """The proper score that contenders are chosen by."""
        return self.search.choice_metric_for(self.deployment.problem)

    def _best(self, order: Packet) -> dict[str, int]:
        best = order.require("tries", dict)
        if not all(isinstance(number, int) and 0 <= number < self.search.trials for number in best.values()):
            raise MessageError("tries should be a number for every contender")
        return dict(best)

    def _stored(self, order: Packet) -> dict[str, Tensor]:
        entry = self.vault.entry(order.require("run", str), self.name)
        path = entry.folder / MODELS
        if not path.exists():
            raise Refused(f"{self.name} has no finished search of this run")
        return storage.read_tensors(path)


class RunClient(NodeClient):
    """The client in one run of a search."""

    def __init__(self, fit: FitClient, deployment: Deployment) -> None:
        super().__init__(fit.settings, deployment)
        self.fit = fit
        self.gate.within(fit.gate)

    def _prepare(self, kind: str, order: Packet) -> Preparation:
        if self.fit.is_private:
            self.gate.least_rate = self.fit.rate(order, self.algorithm.training.batch)
        return prepare(self.gate, kind, order, self.run, self.fit.prepared(order, self.deployment))

    def _entry(self, order: Packet) -> Any:
        if order.header["kind"] in wire.SECURE_KINDS:
            return self._entry_apart(order)
        if self.fit.kept is None:
            raise MessageError("a request of one run of a search, which has to come with those of the others")
        if self.fit.is_private:  # answers that have a price are kept one by one
            return self._entry_apart(order)
        return SearchRunEntry(self.fit.kept, f"{_run_name(order, '/')}/")

    def _entry_apart(self, order: Packet) -> VaultEntry:
        """A folder of this run alone."""
        whole = self.vault.entry(order.require("run", str), self.name)
        return VaultEntry(whole.folder / "runs" / _run_name(order, "-"), whole.run, whole.client)

    def train(self, order: Packet) -> Packet:
        with nullcontext() if self.run.secure is None else self._entry_apart(order).locked():
            return super().train(order)

    def _session(self, order: Packet, entry: VaultEntry) -> SecureSession:
        return super()._session(order, self._entry_apart(order))

    def _least_in_sum(self) -> int:
        """All sites: of two sums that begin with one model and differ by a site, the difference is its update."""
        return max(super()._least_in_sum(), self.deployment.num_clients)

    def _again(self, order: Packet, entry: Any) -> Packet | None:
        answer = super()._again(order, entry)
        if answer is not None and isinstance(entry, SearchRunEntry):
            entry.runs.again.add(entry.prefix)
        return answer

    def evaluate(self, order: Packet) -> Packet:
        """Make the models of this run, and keep what they say of the rows that validate or test them."""
        prepared, entry, accepted = (
            self._prepare(wire.EVALUATE, order),
            self._entry(order),
            order.require("accepted", int),
        )
        server, cohort = asked_server_model(order), prepared.cohort(order.require("round", int))
        with self.gate.locked_if_private(), entry.locked():
            client, moments, lost = prepared.state(entry, accepted)
            request = gated_request(self.gate, prepared, entry, stored_state(client, moments))
            task, protected = request.protect(prepared.task, cohort)
            with recorded(task, EVALUATION) as record:
                models = deployed_models(
                    self.algorithm, task, client, prepared.down, protected,
                    trained=torch.tensor([accepted > 0 and not lost]), server_model=server,
                )  # fmt: skip
            request.settle(record)
        number, part, results = order.require("try", int), order.require("part", int), self.fit.results
        for one in contenders_of(self.deployment.method):
            theta = server if one.model == "server" else next(iter(models.values()))
            if theta is None:
                raise MessageError(f"a request to judge {one.name} without a server's model")
            outputs = outputs_of_rows(prepared.task, theta, cohort.test, prepared.data.problem)
            if part < order.require("folds", int):
                results[_key("fold", one.name, number, part)] = outputs
            else:
                results[_key("test", one.name, number)] = outputs
                results[_key("theta", one.name, number)] = theta[0].detach().clone()
        header = self._reply_header(order) | {"lost": lost}
        return self.gate.release(wire.EVALUATE, Packet(header), "no figures", order.require("run", str))


def target_moments(data: Federation) -> ValueMoments:
    """Count, mean and squared distances of the target in training rows; nothing of other kinds than numbers and
    counts, whose problem is known to everybody."""
    if data.problem.kind not in ("regression", "counts"):
        return ValueMoments()
    values = data.labels[data.train.rows].double()
    mean = values.mean()
    return ValueMoments(len(values), float(mean), float((values - mean).square().sum()))


def row_counts(data: Federation) -> list[int]:
    return [int(data.split(name).count[0]) for name in ("train", "val", "test")]


def _run_name(order: Packet, between: str) -> str:
    return between.join((str(order.require("try", int)), order.require("method", str), str(order.require("part", int))))


def _key(*parts: str | int) -> str:
    return "/".join(map(str, parts))
