"""Metrics of every client against scikit-learn's, pooled sums against pooled examples, and what is undefined."""

import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import sklearn.metrics as reference
import torch

import kinfed
from kinfed.analysis import cautions, metric_style
from kinfed.data.examples.problem import Problem
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.engine.scoring.score import Score, bootstrap_draws, deviation_of_draws, error_draws, summarize
from kinfed.errors import ConfigError
from kinfed.records.run_record import headline_text

SIZES = (30, 25, 90)


def client_sums(data):
    zero, ids = torch.zeros(data.clients), torch.arange(data.clients)
    return Score(zero, zero, zero).judged_by(METRICS.headline(data.problem, None), data, ids).sums


def judged(classes: int, seed: int = 0) -> Judged:
    rng = np.random.default_rng(seed)
    total = sum(SIZES)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    if classes == 0:
        target = rng.normal(size=total)
        output = (target + rng.normal(size=total))[:, None]
        return Judged(output, target, owner, len(SIZES), Problem("regression", mean=5.0, scale=3.0))
    target = rng.integers(0, classes, total)
    output = np.round(4 * rng.normal(size=(total, classes)) + 3 * np.eye(classes)[target]) / 4  # with exact ties
    return Judged(output, target, owner, len(SIZES), Problem.of_classes(classes))


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def expected(name, z, y, problem):
    if problem.is_regression:
        true, guess = y * problem.scale + problem.mean, z[:, 0] * problem.scale + problem.mean
        return {
            "rmse": lambda: reference.root_mean_squared_error(true, guess),
            "mae": lambda: reference.mean_absolute_error(true, guess),
            "r2": lambda: reference.r2_score(true, guess),
        }[name]()
    p, guess, classes = softmax(z), z.argmax(1), problem.num_classes
    two = classes == 2
    one_hot = np.eye(classes)[y]
    return {
        "accuracy": lambda: reference.accuracy_score(y, guess),
        "balanced_accuracy": lambda: reference.balanced_accuracy_score(y, guess),
        "f1": lambda: reference.f1_score(y, guess) if two else reference.f1_score(y, guess, average="macro"),
        "auroc": lambda: (
            reference.roc_auc_score(y, p[:, 1]) if two else reference.roc_auc_score(y, p, multi_class="ovr")
        ),
        "average_precision": lambda: reference.average_precision_score(y, p[:, 1]),
        "log_loss": lambda: reference.log_loss(y, p, labels=range(classes)),
        "brier": lambda: reference.brier_score_loss(y, p[:, 1]) if two else ((p - one_hot) ** 2).sum(1).mean(),
        "calibration_error": lambda: calibration_error(p.max(1), guess == y),
    }[name]()


def calibration_error(sure, right):
    place, total = np.minimum((sure * 10).astype(int), 9), 0.0
    for b in range(10):
        if (place == b).any():
            total += (place == b).mean() * abs(right[place == b].mean() - sure[place == b].mean())
    return total


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_every_client_gets_what_scikit_learn_says(classes):
    data = judged(classes)
    sums = client_sums(data)
    assert sums.keys() == {
        one.name for one in map(METRICS.named, METRICS) if data.problem.kind in one.kinds and not one.needs_start
    }
    for name, pairs in sums.items():
        values = METRICS.named(name).value(pairs)
        for k in range(len(SIZES)):
            mine = data.owner == k
            want = expected(name, data.output[mine], data.target[mine], data.problem)
            assert values[k].item() == pytest.approx(want, abs=1e-9), (name, k)


@pytest.mark.parametrize("name", ["accuracy", "f1", "log_loss", "brier", "rmse", "mae"])
def test_sums_over_clients_are_those_of_all_examples(name):
    data = judged(0 if name in ("rmse", "mae") else 2)
    pooled = METRICS.named(name).value(client_sums(data)[name].sum(0)).item()
    assert pooled == pytest.approx(expected(name, data.output, data.target, data.problem), abs=1e-9)


def test_auroc_of_one_class_is_undefined_and_left_out_of_means():
    data = judged(2)
    target = data.target.copy()
    target[data.owner == 1] = 1
    one_class = Judged(data.output, target, data.owner, data.clients, data.problem)
    sums = client_sums(one_class)
    values = METRICS.named("auroc").value(sums["auroc"])
    assert torch.isnan(values).tolist() == [False, True, False]
    n = torch.tensor(SIZES)
    figures = summarize(n.double(), n.double(), n, n, sums)
    assert figures["auroc_mean"] == pytest.approx(values[[0, 2]].mean().item())
    nowhere = Judged(data.output, np.ones_like(target), data.owner, data.clients, data.problem)
    assert "auroc" not in summarize(n.double(), n.double(), n, n, client_sums(nowhere))


def test_the_worst_tenth_knows_which_way_is_worse():
    n = torch.ones(10, dtype=torch.int64)
    sums = torch.stack([torch.arange(1.0, 11), torch.ones(10)], 1).double()
    figures = summarize(None, n.double(), n, n, {"mae": sums, "r2": sums})
    assert figures["mae_worst10"] == 10
    assert figures["r2_worst10"] == 1 - 10


def test_errors_are_those_of_the_binomial_and_do_not_depend_on_other_clients():
    data = judged(2)
    errors = deviation_of_draws(error_draws(METRICS.named("accuracy"), data, torch.tensor([4, 9, 2])))
    share = METRICS.named("accuracy").value(client_sums(data)["accuracy"])
    theory = (share * (1 - share) / torch.tensor(SIZES)).sqrt()
    assert errors.numpy() == pytest.approx(theory.numpy(), rel=0.35)
    mine = data.owner == 2
    alone = Judged(data.output[mine], data.target[mine], np.zeros(mine.sum(), int), 1, data.problem)
    again = deviation_of_draws(error_draws(METRICS.named("accuracy"), alone, torch.tensor([2])))
    assert again[0].item() == pytest.approx(errors[2].item())


def test_the_error_of_a_gain_counts_the_rows_that_two_models_judge_otherwise() -> None:
    """Var(d) / n of the row-wise differences d; were the rows taken for others, the two variances would add up."""
    one = judged(2)
    output = one.output.copy()
    output[::7] = output[::7, ::-1]  # every seventh row is judged the other way round
    other, ids = replace(one, output=output), torch.tensor([4, 9, 2])
    zero, accuracy = torch.zeros(3), METRICS.named("accuracy")
    scores = [Score(zero, zero, zero, {}, partial(error_draws, accuracy, d, ids)) for d in (one, other)]
    scores[0].compare(scores[1])
    errors = scores[0].error_of_gain
    assert errors is not None
    d = (one.predicted == one.target).astype(float) - (other.predicted == other.target)
    theory = [np.sqrt(d[one.owner == k].var() / SIZES[k]) for k in range(3)]
    assert errors.numpy() == pytest.approx(theory, rel=0.35)
    apart = torch.hypot(*(score.error for score in scores))
    assert bool((errors < apart / 1.5).all())
    assert scores[0].draws is None  # nobody needs them any more
    scores[1].compare(scores[1])
    assert scores[1].error_of_gain is not None
    assert not scores[1].error_of_gain.any()


def test_draws_survive_choice_joining_and_the_way_to_other_processes() -> None:
    data, ids = judged(2), torch.tensor([4, 9, 2])
    zero = torch.zeros(3)
    whole = Score(zero, zero, zero, {}, partial(error_draws, METRICS.named("accuracy"), data, ids))
    parts = [whole.take(torch.tensor([2, 0])), whole.take(torch.tensor([1]))]
    joined = pickle.loads(pickle.dumps(Score.joined(parts, torch.tensor([1, 2, 0]))))
    assert whole.draws is not None
    assert torch.equal(joined.draws, whole.draws)
    # Where one part knows no more than its error, that is what the whole knows.
    mixed = Score.joined([parts[0], Score(*torch.zeros(3, 1), {}, torch.tensor([0.5]))])
    assert mixed.draws is None
    assert mixed.error is not None
    assert mixed.error[2] == 0.5


def test_headlines_by_our_names_and_scikit_learns():
    two, numbers = Problem.of_classes(2), Problem.of_numbers([1.0, 2.0])
    assert METRICS.headline(two, None).name == "accuracy"
    assert METRICS.headline(numbers, None).name == "rmse"
    assert METRICS.headline(two, "roc_auc").name == "auroc"
    assert METRICS.headline(numbers, "neg_mean_absolute_error").name == "mae"
    with pytest.raises(ConfigError, match="is not for"):
        METRICS.headline(numbers, "auroc")
    with pytest.raises(ConfigError, match="auroc"):
        METRICS.headline(two, "aurok")


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_a_row_of_weight_two_is_two_rows(classes: int) -> None:
    data = judged(classes)
    times = np.random.default_rng(1).integers(1, 4, len(data.target))
    weighted, repeated = replace(data, weight=times.astype(float)), data.rows(np.repeat(np.arange(len(times)), times))
    names = [one.name for one in METRICS.of_problem(data.problem)]
    for name in [*names, "neg_mean_squared_error" if classes == 0 else "matthews_corrcoef"]:
        ours, theirs = (np.stack(METRICS.named(name).sums(one)) for one in (weighted, repeated))
        np.testing.assert_allclose(ours, theirs, err_msg=name)
    np.testing.assert_array_equal(weighted.examples, SIZES)
    first, ids = METRICS.named(names[0]), torch.arange(len(SIZES))
    draws = bootstrap_draws(first, replace(data, weight=np.ones(len(times))), ids)
    torch.testing.assert_close(draws, bootstrap_draws(first, data, ids))


def test_scorers_without_weights_say_so() -> None:
    data = replace(judged(0), weight=np.ones(sum(SIZES)))
    with pytest.raises(ConfigError, match="neg_max_error takes no weights of rows"):
        METRICS.named("neg_max_error").sums(data)


def error_rule(calls, values):
    calls.append(values)
    return torch.tensor(values)


def test_errors_are_computed_when_they_are_asked_for():
    """Of two parts joined in another order, and in another process; not before."""
    calls = []

    def part(values):
        zero = torch.zeros(len(values))
        return Score(zero, zero, zero, {}, partial(error_rule, calls, values))

    joined = Score.joined([part([1.0, 2.0]), part([3.0])], torch.tensor([2, 0, 1]))
    assert not calls
    assert joined.error is not None
    assert joined.error.tolist() == [3.0, 1.0, 2.0]
    assert joined.error.tolist() == [3.0, 1.0, 2.0]
    assert len(calls) == 2
    sent = pickle.loads(pickle.dumps(part([4.0])))
    assert sent.error.tolist() == [4.0]
    assert Score.joined([part([1.0]), Score(*torch.zeros(3, 1))]).error is None


def test_a_metric_of_ones_own_is_one_like_any_other(federation, missed, tmp_path):
    settings = {"rounds": 2, "seeds": (0, 1), "model": "mlr", "participation": 1.0, "algorithms": "local,fedavg"}
    result = kinfed.run(federation=federation, metric="missed", out=tmp_path / "run", **settings)
    entry = result.result("fedavg")
    assert entry.metric == "missed"
    assert {"missed", "missed_mean", "missed_worst10"} <= entry.personal.keys()
    sums = entry.evaluation.personal.sums["missed"]
    assert entry.personal["missed"] == pytest.approx((sums[:, 0].sum() / sums[:, 1].sum()).item())
    assert "personal_missed" in result.clients("pyarrow").column_names
    assert result.comparison.metric == "missed"
    style = result.comparison.style
    assert (style.title, style.unit, style.lower_is_better) == ("Missed", " %", True)
    page = result.report().read_text()
    assert "Missed" in page
    assert "Share of the second class that is missed." in page
    assert headline_text(entry.personal, "missed").startswith("Missed ")
    other = kinfed.run(federation=federation, **settings)
    assert "missed" in other.result("fedavg").personal
    METRICS.unregister("missed")
    unknown = kinfed.load(tmp_path / "run")
    assert unknown.comparison.metric == "accuracy"
    assert any("missed" in note and "--plugin" in note for note in cautions(unknown.comparison))


def test_a_metric_that_cannot_be_is_refused():
    for about, message in (
        ({"of": "rows"}, "of=.examples. or of=.clients."),
        ({"precent": True}, "property of a metric"),
    ):
        with pytest.raises(ConfigError, match=message):
            kinfed.register("metric", "odd", lambda judged: None, **about)
    with pytest.raises(ConfigError, match="loss is a figure of every summary"):
        kinfed.register("metric", "loss", lambda scores: 0.0)
    kinfed.register("metric", "odd", lambda judged: (np.zeros(1), np.ones(1)), of="examples")
    try:
        with pytest.raises(ConfigError, match="metric odd must give numerators and denominators of 3 clients"):
            METRICS.named("odd").sums(judged(2))
    finally:
        METRICS.unregister("odd")


def test_a_figure_over_clients_is_no_headline():
    kinfed.register("metric", "best", lambda scores: scores.accuracy.max().item(), title="Best client", unit="%")
    try:
        assert metric_style("best").title == "Best client"
        with pytest.raises(ConfigError, match="metric best is a figure over all clients"):
            METRICS.headline(Problem.of_classes(2), "best")
    finally:
        METRICS.unregister("best")
