"""Personal boosted trees against boosting of pooled rows written out, closed forms of intercepts, and planted sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfed
from kinfed import simulate
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.trees.tree_candidates import NAMES
from kinfed.algorithms.trees.tree_messages import DONE, GROW, Down, Server
from kinfed.algorithms.trees.trees import LOSSES
from kinfed.data.examples.local_training import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine import module_for, task_for
from kinfed.engine.contract.objective import SQUARED
from kinfed.engine.trees import LocalTrees, TreeLoss, Trees
from kinfed.engine.trees.tree_bins import codes_of, flat_rows
from kinfed.engine.trees.tree_growth import ClientRows, TreeGrowth
from kinfed.errors import ConfigError
from kinfed.newcomers import adopt
from kinfed.server.loop import Loop
from kinfed.updates import SecureSettings, SecureSum

Array = np.ndarray[Any, Any]
SITES, EACH = 6, 40


def rows(seed: int = 0, level: float = 1.0) -> tuple[Array, Array, Array]:
    """x, y and site of sites that differ in level."""
    draw = np.random.default_rng(seed)
    site = np.repeat(np.arange(SITES), EACH)
    x = draw.normal(size=(len(site), 3)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 1.0, -1.0) * np.abs(x[:, 1]) + level * (site - 2.5) + 0.3 * draw.normal(size=len(site))
    return x, y, site


def federation(classes: bool = False, **options: Any) -> Federation:
    x, y, site = rows(**options)
    return Federation.from_arrays(x, (y > 0).astype(int) if classes else y, site)


def finished(data: Federation, **options: Any) -> Loop:
    """A run with a few trees, after its last round."""
    loop = simulate(data, "mlr", "trees", **{"trees": 3, "depth": 3, "bins": 16, "min_rows": 5, "rate": 0.3} | options)
    while loop.round().active:
        pass
    return loop


def pooled_boosting(data: Federation, server: Server, trees: int) -> tuple[list[TreeGrowth], Array]:
    """The trees of all rows in one place, by formulas (1) to (3) row by row, and the intercepts at their end."""
    index, owner = data.train.rows, data.train.owner.numpy()
    x, y = flat_rows(data.features, index), data.targets[index].numpy().astype(np.float64)
    codes, score = codes_of(x, server.edges.numpy()), np.full(len(y), y.mean())
    b, tau, phi, grown = np.zeros(SITES), 5.0, 1.0, []
    count = np.bincount(owner)

    def newton() -> Array:
        return b + (np.bincount(owner, y - score - b[owner]) - tau * b) / (count + tau)

    for _ in range(3):
        b = newton()
    for _ in range(trees):
        size = (b**2 + phi / (count + tau)).mean()
        g = score + b[owner] - y
        phi = float((g**2).mean())
        tau = phi / size
        growth = TreeGrowth.start(3, 1.0, np.array([5.0]))
        node = np.zeros(len(y), np.int64)
        for level in range(3):
            sums = np.zeros((1, 2**level, codes.shape[1], 16, 2))
            for i, j in np.ndindex(*codes.shape):
                sums[0, node[i], j, codes[i, j]] += g[i], 1.0
            growth.grow(sums, np.arange(2**level, dtype=np.int16)[None])
            inner = 2**level - 1 + node
            j = growth.feature[0, inner]
            left = (codes[np.arange(len(y)), np.maximum(j, 0)] <= growth.split[0, inner]) | (j < 0)
            node = 2 * node + ~left
        score = score + growth.values(0.3)[0, node, 0]
        b = newton()
        grown.append(growth)
    return grown, b


def test_trees_from_sums_are_those_of_pooled_rows() -> None:
    data = federation()
    loop = finished(data, folds=0)
    server: Any = loop.server
    wanted, _ = pooled_boosting(data, server, 3)
    for t, tree in enumerate(wanted):
        assert np.array_equal(server.trees.feature[0, t].numpy(), tree.feature[0])
        assert np.array_equal(
            server.trees.split[0, t].numpy()[tree.feature[0] >= 0], tree.split[0][tree.feature[0] >= 0]
        )
        assert np.allclose(server.trees.value[0, t].numpy(), tree.values(0.3)[0], atol=1e-4)


def test_the_intercept_is_the_shrunk_mean_of_residuals() -> None:
    """For numbers Newton's step is exact: b_k = Σ r / (n_k + τ), which the personal model adds to the server's."""
    data = federation()
    with finished(data, folds=0) as loop:
        server: Any = loop.server
        models, own = loop.algorithm.server_models(server), loop.evaluate(keep_models=True).models
        assert models is not None
        assert own is not None
        for k in range(SITES):
            index = data.train[k]
            x, y = data.features.gather(index)[None], data.targets[index]
            shared = task_for(loop.task, models.models).logits(models.models, x)[0, :, 0]
            personal = task_for(loop.task, own).logits(own[k : k + 1], x)[0, :, 0]
            b = float((y - shared).sum()) / (len(index) + float(server.tau[0, 0]))
            assert torch.allclose(personal - shared, torch.full_like(shared, b), atol=1e-4)


@pytest.mark.parametrize("classes", [False, True])
def test_a_finished_run_has_chosen_and_asks_nobody(classes: bool) -> None:
    with finished(federation(classes), folds=2) as loop:
        server: Any = loop.server
        assert int(server.phase) == DONE
        assert float(server.best.sum()) == pytest.approx(1)
        report = loop.round()
        assert (report.active, report.bytes_down, report.bytes_up) == (0, 0, 0)


def test_personal_trees_beat_the_servers_where_sites_differ() -> None:
    with finished(federation(level=2.0), trees=20, folds=2) as loop:
        evaluation = loop.evaluate()
    assert evaluation.personal is not None
    assert evaluation.server_model is not None
    assert float(evaluation.personal.loss.sum()) < 0.3 * float(evaluation.server_model.loss.sum())


def test_sites_that_share_nothing_learn_alone() -> None:
    """The effect of the feature is reversed at every other site."""
    x, _, _ = rows()
    site = np.repeat(np.arange(4), 60)
    y = np.where(site % 2 == 0, 1.0, -1.0) * np.sign(x[:, 0]) + 0.05 * x[:, 2]
    with finished(Federation.from_arrays(x, y, site), trees=6, folds=2) as loop:
        server: Any = loop.server
        personal, shared = loop.evaluate().personal, loop.evaluate().server_model
    shares = dict(zip(NAMES, server.best.tolist(), strict=True))
    assert shares["own"] + shares["early"] + shares["alone"] >= 0.7
    assert personal is not None
    assert shared is not None
    assert float(personal.loss.sum()) < 0.5 * float(shared.loss.sum())


def test_steps_are_larger_where_the_loss_still_falls_after_a_quarter_of_the_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few trees end growth early, so that from the fifth of sixteen on leaves say three times as much; of eighty
    trees the twenty-first has little left to say, and nothing changes."""

    def values(trees: int) -> Any:
        options = {"trees": trees, "rate": 0.1, "folds": 1, "patience": 3, "personal": False}
        with finished(federation(level=0.0), **options) as loop:
            server: Any = loop.server
        return server.trees.value[0]

    few, many = values(16), values(80)
    monkeypatch.setattr("kinfed.algorithms.trees.trees.HASTE", 1.0)
    few_small, many_small = values(16), values(80)
    assert torch.equal(few[:4], few_small[:4])
    torch.testing.assert_close(few[4], 3 * few_small[4])
    assert not torch.allclose(few[5], 3 * few_small[5])  # the next tree follows the larger step
    assert torch.equal(many, many_small)


def test_trees_are_deeper_where_the_loss_still_falls_after_a_quarter_of_the_trees() -> None:
    options = {"trees": 16, "depth": 4, "rate": 0.1, "folds": 1, "patience": 3, "personal": False}
    with finished(federation(level=0.0), **options) as loop:
        server: Any = loop.server
    first, others = server.trees.feature[0, :4], server.trees.feature[0, 4:]
    assert bool((first[:, :7] >= 0).any())
    assert bool((first[:, 7:] == -1).all())
    assert bool((others[:, 7:] >= 0).any())


def test_bytes_are_those_of_histograms_moments_and_losses() -> None:
    loop = simulate(federation(), "mlr", "trees", depth=4, bins=16, folds=1)
    with loop:
        report = loop.round()
    features, ensembles, slots = 3, 4, 4  # with intercepts and without, of all rows and of one fold
    sums = features * max(ensembles * slots * 16 * 2, 512)
    each = sums + ensembles * (4 + 4) + LOSSES
    assert report.bytes_up == SITES * 4 * each


def test_secure_sums_grow_the_same_trees() -> None:
    data = federation()
    settings, algorithm = SecureSettings(), make_algorithm("trees", LocalTraining(), {})
    stage = SecureSum(settings, settings.averaged_fields("trees", algorithm), SITES)
    plain, secure = (finished(data, folds=0, stages=stages) for stages in ([], [stage]))
    with plain, secure:
        ours, theirs = plain.server.named(), secure.server.named()
    assert torch.equal(ours["trees.feature"], theirs["trees.feature"])
    assert torch.allclose(ours["trees.value"], theirs["trees.value"], atol=1e-4)


def test_clients_that_come_and_go_cost_a_level() -> None:
    """All nodes are asked for, and with depth 3 a message has room for two: trees end after two levels."""
    with finished(federation(), folds=0, dropout=0.4) as loop:
        server: Any = loop.server
    assert int(server.trees.count) == 3
    assert bool((server.trees.feature[0, 1:, :3] >= 0).any())
    assert bool((server.trees.feature[0, 1:, 3:] == -1).all())


def test_a_client_that_was_away_takes_up_what_it_missed() -> None:
    data = federation()
    with simulate(data, "mlr", "trees", trees=3, depth=2, bins=16, min_rows=5, folds=0, participation=0.5) as loop:
        while loop.round().active:
            pass
        states, server = loop.pool.states(), loop.server
        order: Any = Down.of_server(server)
    caught_up = 0
    for place, client in enumerate(states["ids"].tolist()):
        done = int(states["rows.done"][place])
        if done < 1:
            continue
        codes, index = codes_of(flat_rows(data.features, data.train[client]), order.edges.numpy()), np.arange(EACH)
        own = ClientRows(codes, index[: len(codes)], np.array([0, len(codes)]), np.zeros(len(codes)))
        score = np.repeat(order.base.numpy()[None], len(codes), 0)
        own.add(order.grown().cut(0, done), score)
        assert np.allclose(states["rows.score"][place, : len(codes)], score, atol=1e-6)
        caught_up += 1
    assert caught_up > 3  # more than a round calls


def test_a_module_of_a_row_says_what_the_row_says() -> None:
    data = federation(classes=True)
    with finished(data, folds=2) as loop:
        own = loop.evaluate(keep_models=True).models
        assert own is not None
        x = data.features.gather(data.test[2])
        task: Any = loop.task
        module = module_for(task, own[2])
        wanted = task_for(task, own[2:3]).logits(own[2:3], x[None])[0]
        assert torch.allclose(module(x), wanted, atol=1e-6)
        assert wanted.shape == (len(x), 2)


def test_missing_numba_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kinfed.engine.compiled import tree_loops

    data = federation()
    monkeypatch.setattr(tree_loops, "LITTLE", 0)
    with finished(data, folds=2) as loop:
        usual = loop.server.named()
    monkeypatch.setattr(tree_loops, "_has_compiler", lambda: False)
    with finished(data, folds=2) as loop:
        plain = loop.server.named()
    assert all(torch.equal(usual[name], plain[name]) for name in usual)


def test_counts_and_survival_are_learned_with_a_level_per_site() -> None:
    """Rates jump where two features are both positive, and differ by site: trees explain the first, intercepts the
    second."""
    draw, (x, _, site) = np.random.default_rng(5), rows()
    rate = np.exp(2.0 * ((x[:, 0] > 0) & (x[:, 1] > 0)) + 0.4 * (site - 2.5))
    table = {"site": site.astype(str), "a": x[:, 0], "b": x[:, 1]}
    roles: dict[str, Any] = {"client_column": "site", "test_fraction": 0.3}
    counts = kinfed.Federation.from_table(table | {"n": draw.poisson(rate)}, label_column="n", task="counts", **roles)
    time = draw.exponential(1 / rate)
    survival = kinfed.Federation.from_table(
        table | {"t": np.minimum(time, 1.0), "e": (time < 1.0).astype(int)}, time_column="t", event_column="e", **roles
    )
    settings: dict[str, Any] = {"model": "mlr", "rounds": 5, "seeds": (0,), "participation": 1.0, "progress": False}
    options = {"trees_fast": {"trees": 12, "min_rows": 5}, "fedavg": {}}
    for data, figure in ((counts, "deviance"), (survival, "loss")):
        result = kinfed.run(federation=data, algorithms=options, **settings)
        trees, fedavg = (result.result(name).personal[figure] for name in options)
        assert trees < 0.95 * fedavg
        model = result.personal_model("5", "trees_fast")
        answer = np.asarray(model.predict({"a": [-2.0, 2.0], "b": [1.0, 1.0]})).reshape(2, -1)
        assert answer[1, 0] > 1.5 * answer[0, 0] if data is counts else answer[1, -1] < answer[0, -1]
    with pytest.raises(ConfigError, match="counts by the loss of loss=auto; got negative_binomial"):
        kinfed.run(federation=counts, algorithms="trees_fast", loss="negative_binomial", **settings)


def test_bagged_trees_are_averages_of_trees_that_clients_grow_alone() -> None:
    """Two rounds of counts, then two trees of every client; by hand: at every round all grow from the common scores."""
    data, options = federation(), {"trees": 2, "depth": 3, "bins": 16, "rate": 0.5}
    with simulate(data, "mlr", "bagged_trees", **options) as loop:
        for _ in range(4):
            assert loop.round().active == SITES
        server: Any = loop.server
    index, owner = data.train.rows, data.train.owner.numpy()
    x, y = flat_rows(data.features, index), data.targets[index].numpy()
    codes, score, loss = codes_of(x, server.edges.numpy()), np.zeros((len(y), 1, 1), np.float32), TreeLoss(SQUARED, 1)
    first = np.concatenate([[0], np.cumsum(np.bincount(owner))])
    rows_of_all = ClientRows(codes, np.arange(len(y)), first, y)
    for number in range(2):
        grown = LocalTrees(1, 3, 0.5, 1.0, 16).grow(loss, rows_of_all, score, np.ones((len(y), 1), np.float32))
        part = slice(number * SITES, (number + 1) * SITES)
        assert np.array_equal(server.forest.feature[part].numpy(), grown.feature[:, 0, 0])
        np.testing.assert_allclose(server.forest.value[part].numpy(), grown.value[:, 0, 0] / SITES, atol=1e-6)
        for k in range(SITES):
            each = Trees(*(one[k : k + 1] for one in grown.parts))
            added = np.zeros_like(score)
            rows_of_all.add(each, added)
            score += added / SITES


def test_what_cannot_work_is_refused_in_words() -> None:
    data = federation()
    with pytest.raises(ConfigError, match="not trained by steps"):
        simulate(data, "mlr", "trees", finetune=3)
    with pytest.raises(ConfigError, match="depth"):
        make_algorithm("trees", LocalTraining(), {"depth": 1})
    profile = make_algorithm("trees", LocalTraining(), {}).privacy(torch.tensor([5]))
    assert profile is not None
    assert "noise would drown" in profile.impossible


def test_the_fast_preset_takes_fewer_rounds() -> None:
    with simulate(federation(), "mlr", "trees_fast") as loop:
        rounds = 0
        while loop.round().active:
            rounds += 1
        server: Any = loop.server
        assert rounds <= loop.algorithm.rounds_in(5) == 199
    assert int(server.phase) == DONE > GROW


@pytest.mark.parametrize(("method", "options"), [
    ("trees_fast", {"trees": 8, "min_rows": 20}), ("random_trees", {"turns": 15, "trees": 10, "depth": 4}),
])  # fmt: skip
def test_thousands_of_tiny_sites_learn_and_one_that_was_not_there_takes_over(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Sites of one to three rows: the shared trees are nearly all that they have. A new one has 45 rows."""
    draw, K = np.random.default_rng(1), 1500
    site = np.repeat(np.arange(K), 1 + np.arange(K) % 3)
    x = draw.normal(size=(len(site), 2)).astype(np.float32)

    def target(x: Array, level: Array | float) -> Array:
        jump = 3.0 * ((x[:, 0] > 0) & (x[:, 1] > 0))
        return np.asarray(jump + level + 0.1 * draw.normal(size=len(x)), np.float32)

    data = Federation.from_arrays(x, target(x, 0.3 * draw.normal(size=K)[site]), site)
    result = kinfed.run(
        federation=data, algorithms={method: options}, model="mlr", rounds=1, seeds=(0,), participation=1.0,
        progress=False, out=str(tmp_path / "run"),
    ).result()  # fmt: skip
    assert result.personal["rmse"] < 0.75  # 1.3 without features
    fresh = draw.normal(size=(60, 2)).astype(np.float32)
    newcomer = Federation.from_arrays(fresh, target(fresh, 4.0), np.zeros(60))
    adoption = adopt(tmp_path / "run", newcomer)
    assert adoption.adopted is not None
    assert adoption.server is not None
    assert adoption.adopted.loss < adoption.server.loss


def test_clients_that_lack_classes_keep_finite_scores_and_learn() -> None:
    """At a client without a class its curvature vanishes: intercepts once grew to thousands."""
    algorithms: dict[str, Any] = {"trees_fast": {"personal": False}, "fedavg": {}}
    result = kinfed.run(
        algorithms=algorithms, clients=8, rounds=40, model="mlr", participation=1.0, seeds=(0,), progress=False
    )
    trees, fedavg = (result.result(name).personal for name in ("trees_fast", "fedavg"))
    assert trees["loss"] < 0.4
    assert trees["accuracy"] > fedavg["accuracy"] - 0.02
