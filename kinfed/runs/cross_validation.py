"""A run in folds: every method and seed is trained once per fold, and its folds are joined before anything is compared.

Every row of a client is tested in one fold, by a model that was not trained on it. A metric is two sums over test rows
of a client (kinfed.engine.scoring.metrics), and the sums of its folds are added: its figure is that of all its rows.
Rankings (AUROC) compare rows of one fold only, as scores of two models are not on one scale.

Folds of one seed share most of their training rows, so they are no independent repetitions: a joined result counts as
one seed, and differences between methods are judged over seeds (kinfed.analysis.statistics). The bootstrap's error of a
client adds up the variances of its folds, whose test rows are disjoint; what the folds' models have in common is not
in it. Costs are those of one training, the mean over folds. Models are not kept: each has not seen some rows, and what
is to be deployed is trained on all of them, in a run without folds.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kinfed.config import RunConfig
from kinfed.data import Federation
from kinfed.engine import METRICS, Score
from kinfed.pools import Evaluation
from kinfed.records import Baseline, Curves, RoundRecord, RunFolder
from kinfed.runs.baseline import make_baseline
from kinfed.runs.experiment import Experiment
from kinfed.runs.results import ClientTable, EvaluationMetrics, MethodResult, took_part

Part = TypeVar("Part")


class CrossValidation(Experiment):
    """All methods, seeds and folds of one configuration: the experiment of the first fold, with those of the others."""

    def __init__(self, config: RunConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        for fold in range(1, config.folds or 1):
            # With the configuration of the first: without what "all" names and cannot run.
            other = Experiment(self.config, *parts, fold=fold)
            other.share_workers(self)
            self.folds.append(other)

    def trial(self, label: str, seed: int, folder: RunFolder | None) -> MethodResult:
        trained = [fold.run_method(label, seed, folder) for fold in self.folds]
        federations = [fold.inputs.federation(seed) for fold in self.folds]
        result = join_folds(trained, federations, self.inputs.task().classifies)
        if folder is not None:
            folder.append_clients(result.client_columns())
            if result.curves is not None:
                folder.write_curves(label, seed, result.curves.to_json())
        return result

    def baseline(self, seed: int) -> Baseline:
        problem, ids = self.inputs.federation(seed).problem, self.inputs.evaluated_ids(seed)
        headline = METRICS.headline(problem, self.config.metric).name
        score = join_scores([fold.baseline_score(seed) for fold in self.folds], headline)
        clients = joined_clients([fold.inputs.federation(seed) for fold in self.folds])
        return make_baseline(seed, score, ids, clients, problem, self.config.metric)


def join_folds(results: Sequence[MethodResult], federations: Sequence[Federation], classifies: bool) -> MethodResult:
    """The folds of one method and seed as one result."""
    first, n, clients = results[0], len(results), joined_clients(federations)
    for result in results:
        if result.alone is not None and result.evaluation.personal is not None:
            result.evaluation.personal.compare(result.alone)
    evaluation = join_evaluations([result.evaluation for result in results], first.metric)
    everyone = EvaluationMetrics.from_evaluation(evaluation, clients, classifies)
    rows = took_part(evaluation).nonzero().squeeze(1)
    metrics = EvaluationMetrics.from_evaluation(evaluation, clients, classifies, rows)
    return replace(
        first,
        **asdict(metrics),
        all_clients=asdict(everyone),
        evaluation=evaluation,
        server_models=None,
        curves=_joined([result.curves for result in results], Curves.joined),
        bytes_down=round(sum(result.bytes_down for result in results) / n),
        bytes_up=round(sum(result.bytes_up for result in results) / n),
        seconds=sum(result.seconds for result in results) / n,
        diverged=any(result.diverged for result in results),
        folds=n,
        alone=None,  # compared by fold
        client_table=clients,
        journal=tuple(map(RoundRecord.joined, zip(*(result.journal for result in results), strict=True))),
    )


def _joined(parts: Sequence[Part | None], join: Callable[[Sequence[Part]], Part]) -> Part | None:
    """What all folds have, as one; None if one of them lacks it."""
    known = [part for part in parts if part is not None]
    return join(known) if len(known) == len(parts) else None


def joined_clients(federations: Sequence[Federation]) -> ClientTable:
    """Training rows of a fold on average, test rows of all folds."""
    names = federations[0].names
    assert all(data.names == names for data in federations)
    trained = torch.stack([data.train.count for data in federations]).to(torch.float64).mean(0).round()
    tested = torch.stack([data.test.count for data in federations]).sum(0)
    return ClientTable(names, trained.to(torch.int64), tested)


def join_evaluations(parts: Sequence[Evaluation], metric: str) -> Evaluation:
    """Join evaluations of the same clients in several folds."""

    def join(scores: Sequence[Score | None]) -> Score | None:
        return _joined(scores, lambda known: join_scores(known, metric))

    first = parts[0]
    alternatives = {name: join([part.alternatives.get(name) for part in parts]) for name in first.alternatives}
    return Evaluation(
        ids=first.ids,
        personal=join([part.personal for part in parts]),
        server_model=join([part.server_model for part in parts]),
        figures=first.figures,
        alternatives={name: score for name, score in alternatives.items() if score is not None},
        took_part=torch.stack([took_part(part) for part in parts]).any(0),
    )


def join_scores(scores: Sequence[Score], metric: str) -> Score:
    """Sums over the folds' disjoint test rows."""
    sums = {name: torch.stack([score.sums[name] for score in scores]).sum(0) for name in scores[0].sums}
    return Score(
        correct=torch.stack([score.correct for score in scores]).sum(0),
        loss=torch.stack([score.loss for score in scores]).sum(0),
        count=torch.stack([score.count for score in scores]).sum(0),
        sums=sums,
        error_or_draws=_joined_error([score.error for score in scores], scores, metric),
        error_of_gain=_joined_error([score.error_of_gain for score in scores], scores, metric),
    )


def _joined_error(by_fold: Sequence[Tensor | None], scores: Sequence[Score], metric: str) -> Tensor | None:
    """[n] of a mean of folds, each weighing as much as its sums; NaN where a fold that weighs something has none."""
    known = [error for error in by_fold if error is not None]
    if len(known) < len(scores) or any(metric not in score.sums for score in scores):
        return None
    weight = torch.stack([score.sums[metric][:, 1] for score in scores])  # [F, n]
    share = weight / weight.sum(0).clamp_min(1e-300)
    errors = torch.stack(known)
    squares = torch.where(share > 0, (share * errors) ** 2, 0.0).sum(0)
    return torch.where(weight.sum(0) > 0, squares.sqrt(), torch.nan)
