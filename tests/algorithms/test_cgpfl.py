"""CGPFL by hand, at its limits, and on clients whose contexts are known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kinfed.algorithms.base import RoundInfo, check_algorithm_settings
from kinfed.algorithms.cgpfl.cgpfl import CGPFL, NONE, Choice, Client, Server, Up
from kinfed.algorithms.common.averaging import ModelDown
from kinfed.algorithms.common.clustering import match_labels
from kinfed.algorithms.pfedme import PFedMe
from kinfed.algorithms.selffl.cluster import SelfFLCluster
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, check_variant, tiny_federation
from kinfed.testing.workbench import SEED, outcome

WORK = LocalTraining(lr=0.05, batch=10, steps=5)
ALL = LocalTraining(lr=0.05, batch=100, steps=2)  # batches of all examples: gradients by hand
CLASSES, WIDTH = 4, 6


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def planted(contexts: int, clients: int, examples: int = 24, seed: int = 0) -> tuple[Federation, Tensor]:
    """Clients of several contexts: each context has names of its own for the same classes. And who is of which."""
    draw = np.random.default_rng(seed)
    context = np.arange(clients) % contexts
    means = 3 * np.eye(CLASSES, WIDTH)
    kind = draw.integers(0, CLASSES, (clients, examples))
    x = means[kind] + 0.5 * draw.normal(size=(clients, examples, WIDTH))
    y = (kind + context[:, None]) % CLASSES
    owner = np.repeat(np.arange(clients), examples)
    federation = Federation.from_arrays(x.reshape(-1, WIDTH), y.reshape(-1), owner, num_classes=CLASSES, seed=seed)
    return federation, torch.from_numpy(context)


@contextmanager
def simulated(
    method: Any, federation: Federation, participation: float = 1.0, model: Any = linear, seed: int = SEED
) -> Iterator[Loop]:
    task = make_task(model)
    pool = LocalPool(method, task, federation, seed, workers=1)
    try:
        yield Loop(method, task, pool, federation.population(seed), Schedule(participation))
    finally:
        pool.close()


def same_partition(a: Tensor, b: Tensor) -> bool:
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


def server_of(omega: Any, context: Any, **more: Any) -> Server:
    omega = torch.tensor(omega)
    zero, empty = torch.tensor(0.0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    return Server(
        omega=omega,
        context=torch.tensor(context),
        start=omega.mean(0),
        last=more.get("last", torch.zeros(0, omega.shape[1])),
        moved=torch.tensor(0),
        spread=zero,
        step=zero,
        distances=torch.zeros(len(omega), len(omega), dtype=torch.float64),
        choice=Choice(empty, empty, empty, zero),
    )


def aggregate(method: CGPFL, server: Server, ids: Any, uploads: Any) -> Server:
    """The server after its second round, in which these clients replied."""
    info = RoundInfo(2, Population(len(server.context), seed=0))
    return method.aggregate(server, torch.tensor(ids), Up(torch.as_tensor(uploads)), info)


# A client's round by hand.


def gradient(loop: Loop, client: int, theta: Tensor) -> Tensor:
    rows = loop.pool.federation.train[client]
    x, y = loop.pool.federation.features.raw[rows], loop.pool.federation.labels[rows]
    theta = theta.clone().requires_grad_()
    z = x @ theta[:12].reshape(3, 4).T + theta[12:]
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(z, y), theta)
    return g


@pytest.mark.parametrize(("decay", "pull", "restart"), [(0.0, None, False), (0.3, None, False), (0.0, 0.2, True)])
def test_a_clients_round_by_hand(decay: float, pull: float | None, restart: bool) -> None:
    """R = 2 batches, each with S = 3 steps θ ← θ − η (∇f + κ θ + λ (θ − ω)), then ω ← ω − pull (ω − θ)."""
    lr, lam, steps = 0.05, 4.0, 3
    method = CGPFL(
        training=replace(ALL, weight_decay=decay), contexts=1, lam=lam, inner_steps=steps, pull=pull, restart=restart
    )
    bench = Bench(method, federation=tiny_federation((2, 6, 4)), model=lambda: nn.Linear(4, 3))
    with bench.loop(Schedule()) as loop:
        theta: dict[int, Tensor] = {}
        for _ in range(3):
            w = loop.server.omega[0].clone()  # type: ignore[attr-defined]
            copies = []
            for m in range(3):
                omega = w.clone()
                x = theta[m] if m in theta and not restart else w.clone()
                for _ in range(2):
                    for _ in range(steps):
                        x = x - lr * (gradient(loop, m, x) + decay * x + lam * (x - omega))
                    omega = omega - (lr * lam if pull is None else pull) * (omega - x)
                theta[m] = x
                copies.append(omega)
            loop.round()
            found = loop.server.named()["omega"][0]
            torch.testing.assert_close(found, torch.stack(copies).mean(0), rtol=1e-5, atol=1e-6)
            for m in range(3):
                own = loop.pool.clients.take(torch.tensor([m])).named()["theta"][0]
                torch.testing.assert_close(own, theta[m], rtol=1e-5, atol=1e-6)


def test_the_rate_of_later_rounds_falls_for_both_steps() -> None:
    method = CGPFL(training=replace(ALL, lr_decay=0.5), contexts=1, lam=4.0, restart=True, personal_lr=0.1)
    fixed = CGPFL(training=replace(ALL, lr=0.025), contexts=1, lam=4.0, restart=True, personal_lr=0.05)
    data = tiny_federation((2, 6, 4))
    task = make_task(lambda: nn.Linear(4, 3))
    cohort = data.cohort(torch.arange(3), SEED, 2)
    client = method.init_client(task, cohort)
    down = ModelDown(task.init(SEED).repeat(3, 1))
    decayed, plain = method.client_update(task, client, down, cohort), fixed.client_update(task, client, down, cohort)
    assert torch.equal(decayed[1].omega, plain[1].omega)
    assert torch.equal(decayed[0].theta, plain[0].theta)


# Limits.


@pytest.mark.parametrize(("alpha", "participation"), [(1.0, 1.0), (1.0, 0.67), (0.6, 1.0)])
def test_one_context_with_restart_is_pfedme(alpha: float, participation: float) -> None:
    """The same θ bit for bit in the first round; then the averages of models and of differences round differently."""
    options = {"lam": 10.0, "inner_steps": 4, "personal_lr": 0.04}
    ours = Bench(CGPFL(training=WORK, contexts=1, alpha=alpha, restart=True, **options))
    theirs = Bench(PFedMe(training=WORK, beta=alpha, weights="equal", **options))
    with ours.loop(Schedule(participation)) as a, theirs.loop(Schedule(participation)) as b:
        a.round()
        b.round()
        assert torch.equal(a.state()["clients.rows.theta"], b.state()["clients.rows.theta"])
        for _ in range(5):
            a.round()
            b.round()
        w = a.server.named()["omega"][0], b.server.named()["w"]
        torch.testing.assert_close(*w, rtol=0, atol=1e-6)
        torch.testing.assert_close(outcome(a)["personal models"], outcome(b)["personal models"], rtol=0, atol=1e-6)


def test_a_context_for_each_client_leaves_everybody_alone() -> None:
    federation, _ = planted(3, 5)
    with simulated(CGPFL(training=WORK, contexts=5), federation) as loop:
        for _ in range(4):
            loop.round()
            server: Any = loop.server
            assert sorted(server.context.tolist()) == [0, 1, 2, 3, 4]
            assert float(server.spread) == pytest.approx(0.0, abs=1e-20)
        together = outcome(loop)["personal models"]
    for m in range(5):
        # Alone, with its own number, so that it draws the same batches: the others' rounds change nothing for it.
        with simulated(CGPFL(training=WORK, contexts=1), federation) as loop:
            loop.schedule = _Only(m)
            for _ in range(4):
                loop.round()
            torch.testing.assert_close(outcome(loop)["personal models"][m], together[m], rtol=0, atol=1e-6)


class _Only(Schedule):
    def __init__(self, client: int) -> None:
        super().__init__()
        object.__setattr__(self, "client", client)

    def active(self, seed: int, round: int, num_clients: int) -> Tensor:
        return torch.tensor([self.client])  # type: ignore[attr-defined]


def test_renumbered_clients_get_the_same_contexts() -> None:
    federation, _ = planted(3, 9)
    order = torch.tensor([4, 7, 0, 8, 2, 5, 1, 6, 3])
    renumbered = replace(
        federation, train=federation.train.take(order), val=federation.val.take(order), test=federation.test.take(order)
    )
    found = []
    for data in (federation, renumbered):
        with simulated(CGPFL(training=ALL, contexts=3), data) as loop:  # batches of all examples: no draws by number
            for _ in range(4):
                loop.round()
            found.append((loop.server.named()["context"], loop.server.named()["omega"]))
    assert torch.equal(found[1][0], found[0][0][order])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-6)


# Planted contexts.


@pytest.mark.parametrize("contexts", [2, 3, 4])
def test_planted_contexts_are_found_in_the_first_round_and_kept(contexts: int) -> None:
    federation, planted_context = planted(contexts, 12)
    with simulated(CGPFL(training=WORK, contexts=contexts), federation) as loop:
        loop.round()
        first = loop.server.named()["context"].clone()
        assert same_partition(first, planted_context)
        for _ in range(5):
            loop.round()
            assert torch.equal(loop.server.named()["context"], first)  # the same numbers, too
            assert int(loop.server.named()["moved"]) == 0


@pytest.mark.parametrize(("recluster", "participation"), [("active", 0.5), ("all", 0.5), ("all", 0.25)])
def test_planted_contexts_are_found_when_few_take_part(recluster: str, participation: float) -> None:
    for seed in range(2):
        federation, planted_context = planted(4, 16, seed=seed)
        method = CGPFL(training=WORK, contexts=4, recluster=recluster)
        with simulated(method, federation, participation, seed=seed) as loop:
            for _ in range(int(8 / participation)):
                loop.round()
            context = loop.server.named()["context"]
            assert not (context == NONE).any()
            assert same_partition(context, planted_context)


# The server.


def test_contexts_are_averaged_with_their_own_past() -> None:
    method = CGPFL(training=WORK, contexts=2, alpha=0.25)
    server = server_of([[0.0, 0.0], [10.0, 0.0]], [0, 0, 1, 1])
    uploads = [[9.0, 1.0], [11.0, 1.0], [1.0, 2.0], [-1.0, 2.0]]
    new = aggregate(method, server, [0, 1, 2, 3], uploads)
    assert new.context.tolist() == [1, 1, 0, 0]
    assert new.omega.tolist() == [[0.0, 0.5], [10.0, 0.25]]
    assert int(new.moved) == 4
    assert float(new.spread) == pytest.approx(1.0)  # all are 1 away from the mean of their context
    assert method.figures(new)["squared_step"] == (0.5**2 + 0.25**2) / 2
    assert new.start.tolist() == [5.0, 0.375]
    assert server.omega.tolist() == [[0.0, 0.0], [10.0, 0.0]]


def test_a_context_whose_clients_are_absent_stays() -> None:
    """Three replies near context 0, none near context 1, to which client 3 belongs: nobody is moved there."""
    method = CGPFL(training=WORK, contexts=2)
    server = server_of([[0.0], [10.0]], [0, 0, 0, 1])
    new = aggregate(method, server, [0, 1, 2], [[1.0], [2.0], [4.5]])
    assert new.context.tolist() == [0, 0, 0, 1]
    assert new.omega.tolist() == [[2.5], [10.0]]


def test_a_context_that_nobody_belongs_to_takes_the_worst_fitting_reply() -> None:
    method = CGPFL(training=WORK, contexts=2)
    server = server_of([[0.0], [10.0]], [0, 0, 0, NONE])
    new = aggregate(method, server, [0, 1, 2], [[1.0], [2.0], [4.5]])
    assert new.context.tolist() == [0, 0, 1, NONE]
    assert new.omega.tolist() == [[1.5], [4.5]]


def test_fewer_different_replies_than_contexts() -> None:
    method = CGPFL(training=WORK, contexts=3)
    first = server_of([[0.0], [0.0], [0.0]], [NONE] * 4)
    new = aggregate(method, first, [0, 1, 2, 3], [[1.0], [2.0], [1.0], [2.0]])
    assert same_partition(new.context, torch.tensor([0, 1, 0, 1]))
    assert sorted(new.omega.flatten().tolist()) == [0.0, 1.0, 2.0]  # the third stays as it was
    equal = aggregate(method, first, [0, 1, 2, 3], torch.ones(4, 1))
    assert equal.context.tolist() == [0, 0, 0, 0]
    again = aggregate(method, equal, [0, 1, 2, 3], torch.ones(4, 1))
    assert again.context.tolist() == [0, 0, 0, 0]


def test_a_single_reply_moves_its_own_context_only() -> None:
    method = CGPFL(training=WORK, contexts=2)
    server = server_of([[0.0], [10.0]], [0, 1, NONE])
    new = aggregate(method, server, [2], [[8.0]])
    assert new.context.tolist() == [0, 1, 1]
    assert new.omega.tolist() == [[0.0], [8.0]]


def test_last_uploads_are_clustered_again_where_asked() -> None:
    """Client 1 is not called; the new reply of client 0 makes its last upload the only one of its context."""
    method = CGPFL(training=WORK, contexts=2, recluster="all")
    server = server_of([[0.0], [10.0]], [0, 0, 1], last=torch.tensor([[1.0], [3.0], [10.0]]))
    new = aggregate(method, server, [0], [[9.0]])
    assert new.last.tolist() == [[9.0], [3.0], [10.0]]
    assert new.context.tolist() == [1, 0, 1]
    assert new.omega.tolist() == [[3.0], [9.5]]
    assert server.last.tolist() == [[1.0], [3.0], [10.0]]


def test_new_clients_can_open_a_context_under_an_old_number() -> None:
    """Contexts 0 and 1 both near 0: from there k-means would keep them. A new client at 10 makes it begin afresh; the
    cluster at 10 gets the number of the nearer of the two, context 1."""
    method = CGPFL(training=WORK, contexts=2, recluster="all")
    server = server_of([[0.0], [1.0]], [0, 1, NONE], last=torch.tensor([[0.0], [1.0], [0.0]]))
    new = aggregate(method, server, [2], [[10.0]])
    assert new.context.tolist() == [0, 0, 1]
    assert new.omega.tolist() == [[0.5], [10.0]]


def test_matching_gives_every_cluster_another_number_at_the_least_total_distance() -> None:
    """Clusters at 1 and 0.8, contexts at 0.9 and 5: had the first cluster its choice, the second would be far off."""
    points = np.array([[1.0], [0.8], [1.0]])
    label = torch.tensor([0, 1, 0])
    assert match_labels(label, points, np.array([[0.9], [5.0]])).tolist() == [1, 0, 1]
    assert match_labels(label, points, np.array([[0.7], [5.0], [0.9]])).tolist() == [2, 0, 2]


def test_clients_without_a_reply_get_the_mean_of_the_contexts() -> None:
    method = CGPFL(training=WORK, contexts=2)
    server = server_of([[0.0], [10.0]], [0, 0, 0, 1, NONE])
    server = aggregate(method, server, [0, 3], [[1.0], [9.0]])
    assert method.download(server, torch.arange(5)).w.flatten().tolist() == [1.0, 1.0, 1.0, 9.0, 3.0]
    models = method.server_models(server)
    assert models.models.tolist() == [[1.0], [9.0], [3.0]]
    assert models.assignment is not None
    assert models.assignment.tolist() == [0, 0, 0, 1, 2]  # behind the contexts: the model of those without one
    assert models.rows(torch.tensor([4, 0])).tolist() == [[3.0], [1.0]]


def test_before_the_first_clustering_all_have_the_common_start() -> None:
    method, task = CGPFL(training=WORK, contexts=2), make_task(lambda: nn.Linear(4, 3))
    server = method.init_server(task, Population(3, seed=SEED))
    rows = method.server_models(server).rows(torch.arange(3))
    assert torch.equal(rows, task.init(SEED).expand(3, -1))


def test_once_all_have_replied_the_server_models_are_the_contexts() -> None:
    method = CGPFL(training=WORK, contexts=2)
    models = method.server_models(server_of([[0.0], [10.0]], [1, 0, 1]))
    assert models.models.tolist() == [[0.0], [10.0]]
    assert models.assignment is not None
    assert models.assignment.tolist() == [1, 0, 1]


def test_personal_models_are_the_clients_own_once_they_have_trained() -> None:
    method, task, data = CGPFL(training=WORK), make_task(lambda: nn.Linear(4, 3)), tiny_federation((2, 3))
    cohort = data.cohort(torch.arange(2), SEED, 1)
    client = Client(torch.ones(2, 15), torch.tensor([True, False]), torch.zeros(2, dtype=torch.float64))
    found = method.personalize(task, client, ModelDown(torch.zeros(2, 15)), cohort)
    assert found.sum(1).tolist() == [15.0, 0.0]


def test_bytes_by_hand() -> None:
    """One model down and one up for each of four active clients, whatever K."""
    federation, _ = planted(3, 8)
    for contexts in (1, 4):
        with simulated(CGPFL(training=WORK, contexts=contexts), federation, 0.5) as loop:
            report = loop.round()
            d = WIDTH * CLASSES + CLASSES
            assert report.active == 4
            assert report.bytes_down == report.bytes_up == 4 * d * 4


def test_figures() -> None:
    federation, _ = planted(2, 8)
    with simulated(CGPFL(training=WORK, contexts=3, lam=12.0), federation) as loop:
        for _ in range(2):
            loop.round()
        method, server = loop.algorithm, loop.server
        figures = method.figures(server)
        assert figures["contexts"] == figures["contexts_in_use"] == 3
        assert figures["beta"] == pytest.approx(0.05 * 12 * 8 / 2)
        omega = server.named()["omega"]
        assert figures["distances"][0, 1].item() == pytest.approx(float((omega[0] - omega[1]).norm()), rel=1e-5)
        received = omega[server.named()["context"]].clone()
        loop.round()
        after = loop.evaluate(keep_models=True)
        assert after.models is not None
        wanted = (after.models - received).double().square().sum(1)
        torch.testing.assert_close(after.figures["squared_distance_to_context"], wanted, rtol=1e-5, atol=1e-9)
        profile = method.privacy(torch.tensor([3, 50]))
        assert profile is not None
        assert profile.per_round is not None
        assert {k: v.tolist() for k, v in profile.per_round.items()} == {5: [5, 5]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": 0}, "contexts must be at least 1"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"alpha": 0.0}, "alpha must be in"),
        ({"alpha": 1.5}, "alpha must be in"),
        ({"pull": 0.0}, "pull must be in"),
        ({"lam": 30.0}, "pull .* must lie in"),
        ({"lam": 0.0}, "lam must be positive"),
        ({"pull": 0.5, "lam": 50.0}, "unstable"),
        ({"recluster": "some"}, r"recluster must be active \| all"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CGPFL(**{"training": WORK, **options})


def test_momentum_is_refused() -> None:
    method = CGPFL(training=replace(WORK, momentum=0.9))
    with pytest.raises(ConfigError, match="CGPFL's local steps are its own, without momentum"):
        check_algorithm_settings(method, make_task(linear), Population(5, seed=0))


def test_more_contexts_than_clients_are_refused() -> None:
    federation, _ = planted(2, 3)
    with pytest.raises(ConfigError, match="4 contexts need as many clients; got 3"), simulated(CGPFL(), federation):
        pass


# Contexts elsewhere, and further options under the contract.


def test_self_fl_can_take_its_groups_from_contexts() -> None:
    federation, planted_context = planted(3, 12)
    method = SelfFLCluster(training=WORK, clusters=3, recluster_every=3, groups="contexts")
    with simulated(method, federation) as loop:
        for _ in range(3):
            loop.round()
        first = loop.server.named()["group"].clone()
        assert same_partition(first, planted_context)
        for _ in range(6):
            loop.round()
        assert torch.equal(loop.server.named()["group"], first)  # found anew twice, under the same numbers
    with pytest.raises(ConfigError, match=r"groups must be variance \| contexts"):
        SelfFLCluster(training=WORK, groups="classes")


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("cgpfl", {"recluster": "all", "contexts": 3, "alpha": 0.7}),
    ("cgpfl_heur", {"recluster": "all", "solve_rounds": 2}),
    ("selffl_cluster", {"groups": "contexts", "clusters": 2, "recluster_every": 2}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_options_keep_the_contract(name: str, options: dict[str, Any]) -> None:
    check_variant(name, options=options)


def test_the_documents_example_finds_its_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cgpfl.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(block, "cgpfl.md", "exec"), {})
    found = torch.tensor([int(n) for n in re.findall(r"\d+", capsys.readouterr().out)])
    assert same_partition(found, torch.arange(12) % 3)
