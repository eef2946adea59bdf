"""A search on the server's side (method = "fit"): what does each site reach alone, together, or by a method in between?

Every try of every method is a run with a loop, a pool and a population of its own, in every fold and on all training
rows. All advance in step (kinfed.pools.steps), so that a round of all of them is one message to every site and one
back, and the whole search takes as many round trips as one run, and five more:

    greeting, statistics of columns, rounds, figures of all tries, advantages of the chosen tries, what sites take

    <out>/deployment.json   clients and their rows; columns.json: what columns become in every part
    <out>/rounds.jsonl      every round of every run: bytes, and who was missing
    <out>/fit.json, .html   the result and the page for the consortium: one sentence per site
    <out>/checkpoints       the server's side of all runs after every round

Every site must answer every message: a search with a site missing would be another one. It stops then, and goes on from
the last finished round when it is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kinfed.algorithms import ALGORITHMS, check_algorithm_settings, sample_update
from kinfed.core import storage, threads
from kinfed.data import Population, TablePreprocessing
from kinfed.deploy.node.private_figures import SEARCHED
from kinfed.deploy.server.answer_checks import check_same_request
from kinfed.deploy.server.enrol import Roster, TooFewClients, enrol_clients
from kinfed.deploy.server.node_pool import NodePool, made_up_cohort, make_pool
from kinfed.deploy.server.search_answers import (
    Figures,
    Part,
    SiteStatistics,
    joined_choices,
    learnt_parts,
    read_advantages,
    read_figures,
    read_settled,
    read_statistics,
)  # fmt: skip
from kinfed.deploy.server.search_cost import price_of
from kinfed.deploy.server.server_privacy import make_example_budget
from kinfed.deploy.server.status import RUNNING, StatusWriter
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Exchange
from kinfed.deploy.transport.node_request import NodeRequest
from kinfed.deploy.transport.wire import JUDGE, SETTLE, SUMS, WEIGH, Packet
from kinfed.engine import ModuleTask, Task
from kinfed.errors import ConfigError, DataError
from kinfed.pools import Steps, in_step
from kinfed.records import RunFolder
from kinfed.runs import build_task
from kinfed.server import Loop, RoundReport, Schedule
from kinfed.tabular import (
    ChosenTries,
    ContenderRecord,
    FitResult,
    FitSettings,
    SiteChoices,
    consortium_result,
    contenders_of,
    is_tried,
    methods_of,
    write_page,
)  # fmt: skip
from kinfed.updates import ExampleLevel, Stage

CHECKPOINT = "fit"
AUTO = "auto"  # in place of names of methods
SUMMED = (
    "Updates leave sites in secure sums of all of them, and no single one is seen; statistics of columns and figures "
    "of tries leave every site as they are. Methods that need single updates are left out."
)
OWN_ROUNDS = (
    "{} takes {} rounds of its own, each a message to every site, and this search has {}; name it (portfolio) to let "
    "the search take as many"
)


@dataclass(frozen=True)
class RunKey:
    number: int
    method: str
    part: int

    @property
    def name(self) -> str:
        return f"{self.number}/{self.method}/{self.part}"


@dataclass
class SearchRun:
    key: RunKey
    loop: Loop
    pool: NodePool
    rounds: int  # at most

    @property
    def is_over(self) -> bool:
        done = self.loop.completed > 0 and self.loop.algorithm.is_done(self.loop.server)
        return self.loop.completed >= self.rounds or done


@dataclass
class FitServer:
    deployment: Deployment
    exchange: Exchange
    folder: RunFolder
    status: StatusWriter
    alive: dict[RunKey, SearchRun] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # runs, and why
    journal: list[dict[str, Any]] = field(default_factory=list)
    noise: float = 0.0  # of gradients

    def execute(self) -> FitResult:
        self.run, self.roster, self.settings, self.parts = self._enrolled()
        self.status.names = self.roster.names
        self._price()
        self._make_runs()
        completed = self._resume()
        while not all(run.is_over for run in self.alive.values()):
            completed += 1
            self._round(completed)
        best = self._judged()
        result = self._settled(best, self._weighed(best))
        write_page(result, self.folder.path)
        storage.write_json(self.folder.path / "fit.json", result.to_json())
        return result

    @property
    def trips(self) -> int:
        return self.exchange.trips

    # ---- clients and columns ----

    def _enrolled(self) -> tuple[str, Roster, FitSettings, list[Part]]:
        path, search = self.folder.path / "columns.json", self.deployment.search
        assert search is not None
        run, roster = enrol_clients(self.deployment, self.exchange, self.folder.path / "deployment.json")
        if path.exists():
            record = storage.read_json(path, "the columns of a search")
            parts = [Part.from_json(one) for one in record["parts"]]
            sizes = (record["bytes"][0], record["bytes"][1])
            return run, replace(roster, exchanged=sizes), replace(search, folds=len(parts) - 1), parts
        self.exchange.trips += 1  # the greetings
        rows = roster.counts[:, 0]
        settings = search.with_folds(int(rows.median()), int(rows.max()))
        if settings.folds > int(rows.max()):
            raise ConfigError(f"folds = {settings.folds}: the largest site has {int(rows.max())} training rows")
        parts, sizes = self._learnt(roster, settings.folds)
        storage.write_json(path, {"bytes": sizes, "parts": [part.to_json() for part in parts]})
        return run, replace(roster, exchanged=sizes), settings, parts

    def _learnt(self, roster: Roster, folds: int) -> tuple[list[Part], tuple[int, int]]:
        """What columns and targets become in every part, and the bytes that this took."""
        records: dict[str, list[SiteStatistics]] = {}
        largest, private = self.deployment.largest_value, self.deployment.run.privacy is not None

        def take(name: str, answer: Packet) -> None:
            rows = int(roster.counts[roster.names.index(name)].sum())
            records[name] = read_statistics(answer, folds, rows, largest, whole=private)

        orders = {name: Packet({"kind": SUMS, "name": name, "folds": folds}) for name in roster.names}
        self._all(self.exchange.request(SUMS, orders, self.deployment.wait, take), "learning columns")
        of_sites = [records[name] for name in roster.names]
        deployment = self.deployment
        parts = learnt_parts(of_sites, deployment.problem, deployment.run.columns, deployment.own_outputs)
        for sentence in TablePreprocessing.from_json(parts[-1].preprocessing).sentences():
            self.exchange.say(sentence)
        down = len(roster.names) * sum(len(storage.to_json(part.preprocessing).encode()) for part in parts)
        return parts, (down, sum(one.columns.nbytes for site in of_sites for one in site))

    # ---- runs ----

    def _price(self) -> None:
        """Say what a private search will cost, before a row is trained on; fewer tries fit a smaller budget."""
        self.methods = methods_of(self.settings.algorithms, len(self.roster.names), self.deployment.problem.kind)
        privacy = self.deployment.run.privacy
        if privacy is None:
            return
        counts = [part.counts for part in self.parts]
        price = price_of(self.deployment, self.settings, self.methods, counts, self.roster.names)
        self.exchange.say(price.sentence(self.settings.trials, privacy.delta))
        self.settings, self.noise = replace(self.settings, trials=price.trials), price.noise

    def _make_runs(self) -> None:
        sites = len(self.roster.names)
        for number in range(self.settings.trials):
            for method in self.methods:
                if not is_tried(number, method):
                    continue
                chosen = self.deployment.make_try(number, method, sites)
                try:
                    runs = [self._make_run(RunKey(number, method, part), chosen) for part in range(len(self.parts))]
                except ConfigError as error:
                    self._leave_out(method, number, str(error))
                    continue
                if (own := runs[0].rounds) > self.settings.rounds and self.settings.algorithms == AUTO:
                    self._leave_out(method, number, OWN_ROUNDS.format(method, own, self.settings.rounds))
                    continue
                self.alive |= {run.key: run for run in runs}
        if not any(run.loop.algorithm.sends for run in self.alive.values()):
            reasons = "; ".join(f"{method}: {reason}" for method, reason in self._reasons().items())
            raise ConfigError(
                f"nothing is left to compare with learning alone: {reasons or 'a single site has no others'}"
            )
        if self.deployment.run.secure is not None:
            self.exchange.say(SUMMED)
        self.exchange.say(
            f"search {self.run}: {len({key.method for key in self.alive})} methods, {self.settings.trials} tries each, "
            f"{len(self.parts) - 1} folds and all rows: {len(self.alive)} runs, {self.settings.rounds} rounds, "
            f"{'one message' if self.deployment.run.secure is None else 'five messages'} to each site in a round"
        )

    def _make_run(self, key: RunKey, chosen: Any) -> SearchRun:
        part = self.parts[key.part]
        record = None if part.problem.has_classes else part.problem.to_json()
        deployment = self.deployment.of_try(chosen, record)
        counts = part.validated if deployment.validation_share else part.counts
        roster = replace(
            self.roster, counts=counts, shape=part.shape(), preprocessing=part.preprocessing, exchanged=(0, 0)
        )  # statistics of columns were sent once, for all runs
        plain: ModuleTask = build_task(deployment.run, roster.shape, deployment.problem)
        task: Task = plain
        population, algorithm = roster.population(deployment.seed, 1.0), deployment.algorithm
        check_algorithm_settings(algorithm, task, population)
        stages: list[Stage] = []
        if deployment.run.privacy is not None:
            if "needs validation" in algorithm.traits:
                raise ConfigError("it judges models on validation rows, which other runs of a private search train on")
            fixed = {**deployment.run_settings, "dp_noise": self.noise, "dp_epsilon": None, "dp_budget": None}
            budget = make_example_budget(replace(deployment, run_settings=fixed), roster, task, lambda note: None)
            task, stages = budget.task, [ExampleLevel(budget)]
        server = algorithm.init_server(task, population)
        cohort = made_up_cohort(roster, deployment.problem)
        up = sample_update(algorithm, plain, server, cohort, Population(len(roster.names), 0)).named()
        about = {
            "try": key.number, "method": key.method, "part": key.part, "folds": len(self.parts) - 1, "problem": record,
            "num_clients": len(roster.names),
        }  # fmt: skip
        pool = make_pool(deployment, self.run, roster, self.exchange, task, up, about)
        loop = Loop(algorithm, task, pool, population, Schedule(1.0), stages)
        return SearchRun(key, loop, pool, algorithm.rounds_in(self.settings.rounds))

    def _leave_out(self, method: str, number: int, reason: str) -> None:
        """Leave a try out: it counts where all its folds do."""
        known = {(name.partition("/")[2], why) for name, why in self.left_out.items()}
        if f"{number}/{method}" not in self.left_out and (method, reason) not in known:
            self.exchange.say(f"{method}, try {number + 1}, is left out: {reason}")
        self.left_out.setdefault(f"{number}/{method}", reason)
        self.alive = {key: run for key, run in self.alive.items() if (key.number, key.method) != (number, method)}

    def _resume(self) -> int:
        snapshot = self.folder.checkpoints.latest(CHECKPOINT)
        if snapshot is None:
            return 0
        for name, reason in snapshot.extra["left_out"].items():
            number, _, method = name.partition("/")
            self._leave_out(method, int(number), reason)
        for key, run in self.alive.items():
            prefix = f"{key.name}/"
            own = {name[len(prefix) :]: t for name, t in snapshot.tensors.items() if name.startswith(prefix)}
            run.loop.load(snapshot.extra["completed"][key.name], own)
        self.journal, self.exchange.trips = list(snapshot.extra["journal"]), self.trips + snapshot.extra["trips"]
        self.exchange.say(f"resumed after round {snapshot.round}")
        return snapshot.round

    def _round(self, round: int) -> None:
        last = max(self.settings.rounds, round, *(run.rounds for run in self.alive.values() if not run.is_over))
        self.status.update(RUNNING, f"round {round} of {last}")
        runs, began = [run for run in self.alive.values() if not run.is_over], self.exchange.clock()
        for run in runs:
            run.pool.reasons = None  # a run that has all it needs asks no site
        with threads.one_thread():
            reports = in_step([run.loop.steps() for run in runs])
        self._check_answers(runs, f"round {round}")
        for run, report in zip(runs, reports, strict=True):
            self.journal.append(journal_line(run.key, report))
        tensors = {f"{k.name}/{name}": t for k, run in self.alive.items() for name, t in run.loop.state().items()}
        done = {key.name: run.loop.completed for key, run in self.alive.items()}
        extra = {"left_out": self.left_out, "journal": self.journal, "trips": self.trips, "completed": done}
        self.folder.checkpoints.save(CHECKPOINT, round, tensors, extra)
        lines = "".join(storage.to_json(line) + "\n" for line in self.journal)
        storage.write_atomically(self.folder.path / "rounds.jsonl", lines.encode())
        nbytes = sum(report.bytes_down + report.bytes_up for report in reports)
        self.exchange.say(
            f"round {round} of {last}: {len(runs)} runs at {len(self.roster.names)} sites in "
            f"{self.exchange.clock() - began:.1f} s, {nbytes / 1e6:.2f} MB"
        )

    def _check_answers(self, runs: list[SearchRun], what: str) -> None:
        """Leave out the tries that a site cannot run; stop where a site has answered nothing at all."""
        asked = [(run, run.pool.reasons) for run in runs if run.pool.reasons is not None]
        added_up = [pair for pair in asked if self.deployment.run.secure and pair[0].loop.algorithm.sends]
        for name in self.roster.names:  # who goes away between the requests of a sum has answered those that send none
            reasons = [own.get(name) for _, own in added_up or asked]
            if reasons and all(reasons):
                raise TooFewClients(
                    f"{what}: {name}: {reasons[0]}. A search needs every site: mend that, and start it again (flwr "
                    "run), and it goes on from the last finished round"
                )
        for run, own in asked:
            for name, reason in sorted(own.items()):
                self._leave_out(run.key.method, run.key.number, f"{name}: {reason}")
            if run.pool.no_sum:
                self._leave_out(run.key.method, run.key.number, f"{what}: no secure sum: {run.pool.no_sum}")

    # ---- choice ----

    def _header(self, kind: str, k: int, **more: Any) -> dict[str, Any]:
        part = self.parts[-1]
        return {
            "kind": kind, "run": self.run, "round": self.settings.rounds, "number": k, "name": self.roster.names[k],
            "num_clients": len(self.roster.names), "folds": len(self.parts) - 1, "part": len(self.parts) - 1,
            "problem": None if part.problem.has_classes else part.problem.to_json(), **more,
        }  # fmt: skip

    def _ask(
        self, kind: str, answers: dict[int, Any], read: Callable[[Packet], Any], more: Sequence[Mapping[str, Any]] = ()
    ) -> Steps[None]:
        """One request to every site, with `more` in each one's header; `answers` is filled in with what is read."""
        names = self.roster.names
        orders = {name: Packet(self._header(kind, k, **(more[k] if more else {}))) for k, name in enumerate(names)}

        def take(name: str, answer: Packet) -> None:
            check_same_request(orders[name], answer)
            answers[names.index(name)] = read(answer)

        reasons = yield NodeRequest(self.exchange, kind, orders, self.deployment.deadline, take, len(names))
        self._all(reasons, kind)

    def _all(self, reasons: Mapping[str, str], what: str) -> None:
        for name, reason in sorted(reasons.items()):
            raise TooFewClients(
                f"{what}: {name}: {reason}. A search needs every site; start it again when {name} is back"
            )

    def _judged(self) -> ChosenTries:
        """The chosen try of every contender, and its score."""
        self.status.update(RUNNING, "judging all tries")
        runs, figures = list(self.alive.values()), dict[int, Figures]()
        contenders = [one for method in self.methods for one in contenders_of(method)]
        with threads.one_thread():
            steps: list[Steps[None]] = [
                run.pool.judging(*run.loop.to_evaluate()[:2], run.loop.completed, run.loop.to_evaluate()[2])
                for run in runs
            ]
            in_step([*steps, self._ask(JUDGE, figures, read_figures)])
        self._check_answers(runs, "judging")
        method_of = {one.name: one.method for one in contenders}
        usable = [
            {(name, number): sums for (name, number), sums in figures[k].items()
             if f"{number}/{method_of.get(name)}" not in self.left_out}
            for k in range(len(self.roster.names))
        ]  # fmt: skip
        metric = self.settings.choice_metric_for(self.deployment.problem)
        chosen = ChosenTries.of(metric, contenders, self.settings.trials, usable)
        self.contenders = [one for one in contenders if one.name in chosen.tries]
        return chosen

    def _weighed(self, best: ChosenTries) -> SiteChoices:
        """What every site takes, by the advantages of all."""
        part = self.parts[-1]
        validated = int(part.counts[:, 0][part.counts[:, 0] > 1].sum())
        answers: dict[int, tuple[Any, Any]] = {}
        names, sites = best.others, len(self.roster.names)
        if not names:
            raise DataError("no method but learning alone has figures of every site; the log says what was left out")
        more = {"tries": best.tries, "replicates": best.replicates(validated, sites)}
        in_step([self._ask(WEIGH, answers, lambda answer: read_advantages(answer, len(names)), [more] * sites)])
        return joined_choices(names, self.roster.names, answers)

    def _settled(self, best: ChosenTries, choice: SiteChoices) -> FitResult:
        records = [self._contender(one, best, choice) for one in self.contenders]
        header: dict[str, Any] = {
            "tries": {name: number for name, number in best.tries.items() if name in choice.fitted},
            "contenders": [one.__dict__ | {"sends": list(one.sends)} for one in records],
            "longest": self.parts[-1].counts.max(0).values.tolist(), "group": -1,
            "preprocessing": self.parts[-1].preprocessing, "test_rows": int(self.parts[-1].counts[:, 2].sum()),
            "statistics_bytes": self.roster.exchanged[1] // len(self.roster.names), "left_out": self._reasons(),
            "target": self.deployment.run.label_column or "",
        }  # fmt: skip
        own = [
            header | {
                "chosen": choice.chosen[k], "together": choice.together[k],
                "expected": {name: float(one.expected[k]) for name, one in choice.advantages.items()},
            }
            for k in range(len(self.roster.names))
        ]  # fmt: skip
        answers: dict[int, dict[str, Any]] = {}
        columns = [one.name for one in TablePreprocessing.from_json(self.parts[-1].preprocessing).own]
        in_step([self._ask(SETTLE, answers, lambda answer: read_settled(answer, best.tries, columns), own)])
        seconds = f"{self.trips} round trips"
        self.exchange.say(f"every site has its model and its page; {seconds}")
        result = consortium_result(
            self.deployment.problem, self.settings, records, self.roster.names, choice,
            [answers[k] for k in range(len(self.roster.names))], self._reasons(),
            header["statistics_bytes"], header["target"],
        )  # fmt: skip
        added = self.deployment.run
        notes = [note for note, on in ((SEARCHED, added.privacy), (SUMMED, added.secure)) if on is not None]
        return replace(result, notes=(*result.notes, *notes))

    def _reasons(self) -> dict[str, str]:
        """Methods of which no try was left, and why."""
        reasons: dict[str, str] = {}
        for name, reason in self.left_out.items():
            method = name.partition("/")[2]
            tried = [number for number in range(self.settings.trials) if is_tried(number, method)]
            if all(f"{number}/{method}" in self.left_out for number in tried):
                reasons[method] = reason
        return reasons

    def _contender(self, one: Any, best: ChosenTries, choice: SiteChoices) -> ContenderRecord:
        chosen = self.deployment.make_try(best.tries[one.name], one.method, len(self.roster.names))
        advantage = choice.advantages.get(one.name)
        place = chosen.number, one.method, len(self.parts) - 1
        lines = [line for line in self.journal if (line["try"], line["algorithm"], line["fold"]) == place]
        rounds = max(len(lines), 1) * len(self.roster.names)
        run = self.alive[RunKey(chosen.number, one.method, len(self.parts) - 1)]
        return ContenderRecord(
            one.name, one.title, one.method, one.model, chosen.model, chosen.options, best.validation[one.name],
            0.0 if advantage is None else advantage.mean, 0.0 if advantage is None else advantage.spread,
            bytes_up=round(sum(line["bytes_up"] for line in lines) / rounds),
            sends=run.pool.sends,
            hands_on="hands models on" in ALGORITHMS[one.method].target.traits,
        )  # fmt: skip


def journal_line(key: RunKey, report: RoundReport) -> dict[str, Any]:
    return {
        "algorithm": key.method, "try": key.number, "fold": key.part, "round": report.round,
        "seconds": report.seconds, "active": report.active, "dropped": report.dropped,
        "bytes_down": report.bytes_down, "bytes_up": report.bytes_up,
    }  # fmt: skip
