"""kNN-Per, and nearest neighbours beside the model of any method: votes by hand, the share by validation, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_bench import ALL, by_hand, close, deep, models, run, server
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import check_algorithm_settings, privacy_profile
from kinfed.algorithms.common.neighbours import share_by_validation, vote, with_neighbours
from kinfed.algorithms.knnper import KNNPer
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.personal.personal_models import task_for
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.serving.export import export_model
from kinfed.serving.pipeline import ModelPipeline
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.theory.gaussian import GaussianTask

TRAINING = LocalTraining(batch=5, steps=5)


def test_votes_by_hand() -> None:
    """Squared distances over d_f of 0, 1 and 2 to one example of each class; a place without an example has no vote."""
    phi = torch.zeros(1, 1, 2)
    stored = torch.tensor([[0.0, 0.0], [2**0.5, 0.0], [2.0, 0.0], [0.0, 0.0]])

    def extra(k: int) -> Tensor:
        return torch.cat([torch.tensor([0.5, k, 0, 1, 2, -1]), stored.flatten()])[None]

    close(vote(phi, extra(3), 3)[0, 0], torch.tensor([0.665241, 0.244728, 0.090031]), 1e-5)
    close(vote(phi, extra(9), 3)[0, 0], torch.tensor([0.665241, 0.244728, 0.090031]), 1e-5)  # k > N: all of them
    close(vote(phi, extra(1), 3)[0, 0], torch.tensor([1.0, 0.0, 0.0]))


def test_without_a_share_it_is_the_servers_model_of_fedavg() -> None:
    ours, theirs = run(KNNPer(TRAINING, knn=3, knn_share=0.0)), run(make_algorithm("fedavg", TRAINING))
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["personal correct"], theirs["server correct"])
    close(ours["personal loss"], theirs["server loss"], 1e-5)
    assert torch.equal(ours["personal models"][:, :115], theirs["server.w"].expand(6, -1))
    assert torch.equal(ours["without_neighbours loss"], theirs["server loss"])


def test_a_client_remembers_its_examples() -> None:
    """λ = 1, k = 1: right on all that is stored; with room for two examples, on at least these."""
    task, data = make_task(tiny_model), tiny_federation().cohort(torch.arange(6), seed=0, round=1)
    theta = task.init(0).expand(6, -1)
    rows = with_neighbours(task, theta, data, 1, share=1.0, capacity=1000)
    score = task_for(task, rows).score(rows, data.train)
    assert score.correct.tolist() == data.train.count.tolist()
    assert rows.shape[1] == 115 + 2 + 16 * 7 + 1  # as wide for all, whoever is in the cohort
    alone = tiny_federation().cohort(torch.tensor([1]), seed=0, round=1)
    close(with_neighbours(task, theta[:1], alone, 1, share=1.0, capacity=1000)[0], rows[1])
    some = with_neighbours(task, theta, data, 1, share=1.0, capacity=2)
    assert some.shape[1] == 115 + 2 + 2 * 7 + 1
    assert bool((task_for(task, some).score(some, data.train).correct >= data.train.count.clamp_max(2)).all())


def test_the_share_is_the_smallest_of_the_best_on_validation_examples() -> None:
    federation = tiny_federation((20, 20, 20)).with_validation(0.3, 0)
    federation = replace(federation, val=federation.val.filter(federation.val.owner != 2))
    task, data = make_task(tiny_model), federation.cohort(torch.arange(3), seed=0, round=1)
    theta = task.init(0).expand(3, -1)
    rows = with_neighbours(task, theta, data, 5, capacity=1000)
    share = rows[:, 115]
    assert float(share[2]) == 0.5  # no validation example
    for i in range(2):
        hits = []
        for step in range(11):
            trial = rows.clone()
            trial[:, 115] = step / 10
            hits.append(float(task_for(task, trial).score(trial, data.val).correct[i]))
        assert round(float(share[i]) * 10) == hits.index(max(hits))
    again = share_by_validation(task, theta, rows[:, 115:-1], data.val)
    assert torch.equal(again, share)


def test_a_memory_helps_where_clients_disagree() -> None:
    """Half of the clients call the classes by other names: one model cannot be right for both."""
    data = tiny_federation((30,) * 4)
    labels = data.labels.clone()
    for m in (2, 3):
        for rows in (data.train[m], data.test[m]):
            labels[rows] = (labels[rows] + 1) % 3
    bench = Bench("knnper", federation=replace(data, labels=labels).with_validation(0.3, 0))
    with bench.loop() as loop:
        for _ in range(5):
            loop.round()
        evaluation = loop.evaluate()
    assert evaluation.personal is not None
    assert evaluation.server_model is not None
    personal, common = (float(s.correct.sum() / s.count.sum()) for s in (evaluation.personal, evaluation.server_model))
    assert personal > 0.75
    assert personal > common + 0.2


@pytest.mark.parametrize("name", ["ditto", "fedper"])
def test_neighbours_of_any_method(name: str) -> None:
    method = make_algorithm(name, TRAINING, {"knn": 2, "finetune": 1})
    with by_hand(method, model=deep) as loop:
        loop.round()
        evaluation = loop.evaluate(keep_models=True)
        assert evaluation.models is not None
        assert list(evaluation.alternatives)[-2:] == ["without_finetuning", "without_neighbours"]
        assert evaluation.models.shape == (3, 47 + 2 + 6 * 4 + 1)
        assert torch.equal(models(loop), evaluation.models)


def test_a_round_sends_what_fedavg_sends() -> None:
    with by_hand(KNNPer(ALL, knn=3), model=deep) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * 47, 3 * 4 * 48)
        assert len(server(loop)) == 47


def test_exported_models_remember(tmp_path: Path) -> None:
    data, out = tiny_federation(), tmp_path / "run"
    result = kinfed.run(
        out=out, federation=data, model="mlp", algorithms=["knnper"], rounds=1, seeds=[0], eval_every=0, workers=1
    )
    module = ModelPipeline.read(export_model(out, "client-4", out=tmp_path / "one.safetensors").path).module
    score = result.result().evaluation.personal
    assert score is not None
    with torch.no_grad():
        hits = module(data.features.gather(data.test[4])).argmax(1) == data.labels[data.test[4]]
    assert float(hits.sum()) == float(score.correct[4])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="set knn too"):
        KNNPer(ALL, knn_share=0.5)
    profile = privacy_profile(KNNPer(ALL, knn=3), torch.tensor([4]))
    assert profile is not None
    assert "features of its examples" in profile.impossible
    with (
        by_hand(make_algorithm("fedem", TRAINING, {"knn": 2}), model=deep) as loop,
        pytest.raises(Exception, match="one plain model per client, and FedEM has more"),
    ):
        loop.evaluate()
    population = tiny_federation().population(0)
    with pytest.raises(ConfigError, match="vote for classes, and a regression has none"):
        check_algorithm_settings(make_algorithm("ditto", ALL, {"knn": 2}), GaussianTask(torch.ones(2), 1.0), population)
    headless = make_task(lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten()))
    with pytest.raises(ConfigError, match="found by features, which this model lacks"):
        check_algorithm_settings(KNNPer(ALL, knn=3), headless, population)
