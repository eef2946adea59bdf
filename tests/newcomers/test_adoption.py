"""A client that joins a finished run: every method's rule, its place among contexts, its table, and what is refused."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from kinfed.algorithms import ALGORITHMS
from kinfed.algorithms.base import RoundInfo
from kinfed.cli.app import app
from kinfed.data.federations.federation import Federation
from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing
from kinfed.engine.task_factory import make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ConfigError, DataError, KinfedError, ModelError
from kinfed.newcomers.adoption import Adoption, _grown, adopt, with_newcomer
from kinfed.newcomers.finished import FinishedRun, RunInMemory, newcomer_from_table
from kinfed.runs.experiment import run

CLIENTS, CONTEXTS, CLASSES, WIDTH = 9, 3, 4, 6
REFUSED = {"local", "fedavg_data", "mocha", "pfedhn", "apple", "fedbe", "fedmd", "ktpfl"}
# Linear ones, and those with adapters.
OTHER_MODELS = {"mocha", "ffa_lora", "fedex_lora", "flora", "hetlora", "lmm", "glmm", "cox"}


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def examples(context: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Each context has names of its own for the same four classes."""
    draw = np.random.default_rng(seed)
    kind = draw.integers(0, CLASSES, count)
    x = 3 * np.eye(CLASSES, WIDTH)[kind] + 0.5 * draw.normal(size=(count, WIDTH))
    return x, (kind + context) % CLASSES


def federation(clients: int = CLIENTS, groups: bool = False) -> Federation:
    parts = [examples(m % CONTEXTS, 20, 100 + m) for m in range(clients)]
    owner = [m for m, (x, _) in enumerate(parts) for _ in x]
    named = {m: ("phone", "watch")[m % 2] for m in range(clients)} if groups else None
    return Federation.from_arrays(
        np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owner,
        num_classes=CLASSES, groups=named,
    )  # fmt: skip


def newcomer(context: int = 1, seed: int = 7) -> Federation:
    x, y = examples(context, 60, seed)
    return Federation.from_arrays(x, y, [0] * 60, num_classes=CLASSES)


def write_table(path: Path, clients: list[int], count: int = 20, **columns: Callable[[int, int], Any]) -> Path:
    """Rows of some clients; features far from zero, so that their scale matters; further columns of (client, row)."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*columns, "kind", *(f"f{i}" for i in range(WIDTH))])
        for m in clients:
            x, y = examples(m % CONTEXTS, count, 100 + m)
            for row in range(count):
                more = [make(m, row) for make in columns.values()]
                out.writerow([*more, "abcd"[y[row]], *(f"{1000 + 50 * v:.5f}" for v in x[row])])
    return path


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All methods but those that need another model."""
    folder = tmp_path_factory.mktemp("adopt") / "run"
    parts = ("fedbn", "fedsa_lora", "feddpa")  # the model has neither normalization layers nor adapters
    methods = {n: {"own": "*.bias"} if n in parts else {} for n in ALGORITHMS if n not in OTHER_MODELS}
    run(
        algorithms=methods, rounds=3, participation=1.0, steps=5, batch=10, seeds=(0,), eval_every=0, out=folder,
        federation=federation(), model=tiny, workers=1,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def from_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    table = write_table(folder / "all.csv", list(range(CLIENTS)), who=lambda m, _: f"c{m}")
    run(
        dataset=str(table), client_column="who", label_column="kind", model="mlr", rounds=6, participation=1.0,
        algorithms={"cgpfl": {"contexts": 3}, "fedavg": {}}, steps=5, seeds=(0, 1), eval_every=0, workers=1,
        out=folder / "run",
    )  # fmt: skip
    return folder / "run"


def adopted(folder: Path, method: str, who: Federation | None = None, **more: Any) -> Adoption:
    return adopt(folder, who or newcomer(), method, model=tiny, **more)


# Every method.


@pytest.fixture(scope="module")
def by_fedavg(in_order: Path) -> Adoption:
    return adopted(in_order, "fedavg")


@pytest.mark.parametrize("method", [name for name in ALGORITHMS if name not in REFUSED | OTHER_MODELS])
def test_every_method_serves_a_newcomer(in_order: Path, by_fedavg: Adoption, method: str) -> None:
    found = adopted(in_order, method)
    assert found.rounds == 3
    assert (found.n_train, found.n_test) in ((45, 15), (36, 15))  # some hold out validation examples
    assert found.adopted is not None
    assert found.alone == by_fedavg.alone  # one control for all, validation examples or not
    assert bool(torch.isfinite(found.model).all())
    assert torch.equal(found.model, adopted(in_order, method).model)


@pytest.mark.parametrize("method", [name for name in ALGORITHMS if name not in REFUSED | OTHER_MODELS])
def test_the_others_are_served_as_before(in_order: Path, method: str) -> None:
    opened = FinishedRun.open(in_order)
    made, task = opened.algorithm(method), opened.task(tiny)
    before, after = opened.server(method, made, task), with_newcomer(opened, method, made, task, None)
    ids = torch.arange(CLIENTS)
    about = RoundInfo(4, opened.population())
    ours, theirs = (made.download(made.plan(server, ids, about)[0], ids).named() for server in (before, after))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    one, other = made.server_models(before), made.server_models(after)
    if one is not None:
        assert other is not None
        assert torch.equal(one.rows(ids), other.rows(ids))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("local", "sends its clients nothing"),
        ("fedavg_data", "examples that clients have shared"),
        ("pfedhn", "embedding"),
    ],
)
def test_methods_that_cannot_serve_newcomers_say_why(in_order: Path, method: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        adopted(in_order, method)


def test_mocha_says_why(tmp_path: Path) -> None:
    run(
        algorithms="mocha", rounds=1, steps=2, seeds=(0,), out=tmp_path / "run", federation=federation(4), model="mlr",
        eval_every=0, workers=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="how clients are related"):
        adopt(tmp_path / "run", newcomer())


# The methods' own rules.


def cohort(opened: FinishedRun, who: Federation, round: int) -> Any:
    data = who.cohort(torch.tensor([0]), opened.seed, round)
    return replace(data.train, ids=torch.tensor([CLIENTS]))


def test_fedavg_is_fine_tuned_from_the_servers_model(in_order: Path) -> None:
    opened, who = FinishedRun.open(in_order), newcomer()
    method, task = opened.algorithm("fedavg"), opened.task(tiny)
    w = opened.server("fedavg", method, task).named()["w"]
    wanted = sgd(task, w[None], cohort(opened, who, 3).batches(method.training))
    found = adopted(in_order, "fedavg", who)
    assert torch.equal(found.model, wanted[0])
    score = task.score(w[None], who.cohort(torch.tensor([0]), 0, 0).test)
    assert found.server is not None
    assert found.server.accuracy == float(score.correct / score.count)
    assert found.server.loss == pytest.approx(float(score.loss / score.count))


def test_alone_is_local_training_from_the_start(in_order: Path) -> None:
    opened, who = FinishedRun.open(in_order), newcomer()
    method, task = opened.algorithm("fedavg"), opened.task(tiny)
    theta = task.init(0)[None]
    for number in range(1, 6):
        theta = sgd(task, theta, cohort(opened, who, number).batches(method.training))
    score = task.score(theta, who.cohort(torch.tensor([0]), 0, 0).test)
    found = adopted(in_order, "fedavg", who, rounds=5)
    assert found.alone is not None
    assert found.alone.loss == pytest.approx(float(score.loss / score.count), rel=1e-6)


def test_ditto_that_is_not_held_is_training_alone(tmp_path: Path) -> None:
    run(
        algorithms={"free": {"method": "ditto", "lam": 0.0}}, rounds=2, steps=5, seeds=(3,), out=tmp_path / "run",
        federation=federation(3), model=tiny, eval_every=0, workers=1,
    )  # fmt: skip
    found = adopted(tmp_path / "run", "free", rounds=4)
    assert found.adopted == found.alone
    assert found.seed == 3


def test_a_warm_start_is_the_federations_not_the_loners(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithms": {"free": {"method": "ditto", "lam": 0.0}}, "rounds": 1, "steps": 5, "seeds": (0,),
        "federation": federation(3), "model": tiny, "eval_every": 0, "workers": 1,
    }  # fmt: skip
    run(**settings, out=tmp_path / "cold")
    run(**settings, out=tmp_path / "warm", warm_start=2)
    cold, warm = adopted(tmp_path / "cold", "free", rounds=2), adopted(tmp_path / "warm", "free", rounds=2)
    assert warm.alone == cold.alone == cold.adopted
    assert warm.adopted != warm.alone


@pytest.mark.parametrize("context", range(CONTEXTS))
def test_newcomers_find_their_context(from_table: Path, tmp_path: Path, context: int) -> None:
    client = CLIENTS + context  # of that context, with examples of its own
    table = write_table(tmp_path / "new.csv", [client], 40)
    found = adopt(from_table, newcomer_from_table(from_table, table, "kind"), "cgpfl")
    opened = FinishedRun.open(from_table)
    server: Any = opened.server("cgpfl", opened.algorithm("cgpfl"), opened.task(None))
    assert found.place == f"server model {int(server.context[context])}"
    assert found.server is not None
    assert found.adopted is not None
    assert found.server.accuracy >= 0.8
    assert found.adopted.accuracy >= 0.8


@pytest.mark.parametrize("method", ["cfl", "flhc", "cgpfl_heur"])
def test_a_newcomer_joins_the_cluster_with_the_least_training_loss(in_order: Path, method: str) -> None:
    opened = FinishedRun.open(in_order)
    made, task = opened.algorithm(method), opened.task(tiny)
    server: Any = with_newcomer(opened, method, made, task, None)
    field, models = ("context", "omega") if method == "cgpfl_heur" else ("cluster", "model")
    rows = torch.stack([task.init(0, 1), task.init(0, 2), task.init(0, 3)])
    label = torch.tensor([0, 1, 2] * 3 + [getattr(server, field)[-1]])
    data = newcomer().cohort(torch.tensor([0]), 0, 1)
    data.ids = torch.tensor([CLIENTS])
    for order in ([0, 1, 2], [2, 0, 1]):
        placed: Any = made.place_newcomer(task, replace(server, **{models: rows[order], field: label}), data)
        losses = [float(task.mean_loss(rows[[k]], data.train)) for k in order]
        assert int(getattr(placed, field)[-1]) == int(np.argmin(losses))
        assert torch.equal(getattr(placed, field)[:-1], label[:-1])


def test_a_context_without_clients_is_not_joined(in_order: Path) -> None:
    opened = FinishedRun.open(in_order)
    made, task = opened.algorithm("cgpfl"), opened.task(tiny)
    server: Any = with_newcomer(opened, "cgpfl", made, task, None)
    data = newcomer().cohort(torch.tensor([0]), 0, 1)
    data.ids = torch.tensor([CLIENTS])
    best = sgd(task, task.init(0)[None], data.train.batches(replace(made.training, steps=200)))
    rows = torch.cat([task.init(0, 1)[None], task.init(0, 2)[None], best])
    for label, allowed in (([0, 1] * 4 + [1, -1], {0, 1}), ([0, 1, 2] * 3 + [-1], {2})):
        placed: Any = made.place_newcomer(task, replace(server, omega=rows, context=torch.tensor(label)), data)
        assert int(placed.context[-1]) in allowed


def test_fedfomos_newcomer_prefers_what_does_best_on_its_validation_examples(in_order: Path) -> None:
    opened = FinishedRun.open(in_order)
    made, task = opened.algorithm("fedfomo"), opened.task(tiny)
    server: Any = with_newcomer(opened, "fedfomo", made, task, None)
    data = newcomer().with_validation(0.2, 0).cohort(torch.tensor([0]), 0, 1)
    data.ids = torch.tensor([CLIENTS])
    server.theta[4] = torch.nan
    placed: Any = made.place_newcomer(task, server, data)
    losses = torch.stack([task.mean_loss(server.theta[[m]], data.val)[0] for m in range(CLIENTS)])
    finite = [m for m in range(CLIENTS) if m != 4]
    wanted = sorted(finite, key=lambda m: float(losses[m]))
    everyone = torch.arange(CLIENTS + 1)
    row = placed.affinity.rows(everyone[-1:], everyone)[0]
    assert sorted(finite, key=lambda m: -float(row[m])) == wanted
    assert float(row[4]) == 0.0
    before, after = (one.affinity.rows(everyone[:-1], everyone) for one in (server, placed))
    assert torch.equal(before, after)


def test_held_out_examples_do_not_matter(in_order: Path) -> None:
    who = newcomer()
    labels = who.labels.clone()
    labels[who.test.rows] = (labels[who.test.rows] + 1) % CLASSES
    other = replace(who, labels=labels)
    for method in ("cgpfl", "fedfomo", "ditto"):
        first, second = adopted(in_order, method, who), adopted(in_order, method, other)
        assert torch.equal(first.model, second.model)
        assert first.adopted != second.adopted


def test_the_run_is_left_alone(in_order: Path) -> None:
    def stamp() -> dict[str, tuple[int, int]]:
        files = [path for path in in_order.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}

    before = stamp()
    adopted(in_order, "cgpfl")
    assert stamp() == before


# Rows for one more client.


def test_rows_are_added_along_the_axes_of_clients() -> None:
    before, after = torch.zeros(3), torch.tensor([0.0, 0.0, 0.0, 5.0])
    assert _grown("s", torch.tensor([1.0, 2.0, 3.0]), before, after).tolist() == [1.0, 2.0, 3.0, 5.0]
    square = _grown("P", torch.full((2, 2), 7.0), torch.eye(2), torch.eye(3))
    assert square.tolist() == [[7.0, 7.0, 0.0], [7.0, 7.0, 0.0], [0.0, 0.0, 1.0]]
    models = _grown("theta", torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(3, 4))
    assert models.tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]


def test_what_does_not_run_over_clients_stays() -> None:
    chosen = torch.rand(5, 4)  # five contexts where the start had one
    assert _grown("omega", chosen, torch.zeros(1, 4), torch.zeros(1, 4)) is chosen
    assert _grown("round", torch.tensor(9), torch.tensor(0), torch.tensor(0)) == 9
    empty = torch.zeros(2, 0)
    assert _grown("plan", empty, torch.zeros(2, 0), torch.zeros(3, 0)).shape == (3, 0)


def test_state_without_a_row_for_a_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not have one row per client"):
        _grown("head", torch.zeros(6), torch.zeros(6), torch.zeros(8))


# Tables.


def test_features_are_scaled_and_classes_numbered_as_in_the_run(from_table: Path, tmp_path: Path) -> None:
    """Columns in another order, one of them new; only two of the four classes."""
    table = tmp_path / "new.csv"
    table.write_text("f5,f4,note,f3,f2,f1,f0,kind\n" + "6,5,x,4,3,2,1,d\n" * 3 + "6,5,y,4,3,2,1,b\n" * 3)
    who = newcomer_from_table(from_table, table, "kind")
    assert who.labels.tolist() == [3, 3, 3, 1, 1, 1]
    assert who.num_classes == 4
    learnt = TablePreprocessing.from_json(FinishedRun.open(from_table).description.inputs["preprocessing"])
    assert learnt.mean is not None
    wanted = (torch.arange(1.0, 7.0) - learnt.mean) / learnt.std
    torch.testing.assert_close(who.features.gather(torch.tensor([0]))[0], wanted)
    assert float((learnt.mean - 1000).abs().max()) < 100
    assert (int(who.train.count), int(who.test.count)) == (4, 2)


def test_the_scale_is_that_of_the_seed(from_table: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "new.csv", [0])
    means = [newcomer_from_table(from_table, table, "kind", seed=seed).features.mean for seed in (0, 1)]
    assert means[0] is not None
    assert means[1] is not None
    assert not torch.equal(means[0], means[1])


def test_a_split_column_is_followed(from_table: Path, tmp_path: Path) -> None:
    part = ("train", "val", "test", "train")
    table = write_table(tmp_path / "new.csv", [1], 20, part=lambda _, row: part[row % 4])
    who = newcomer_from_table(from_table, table, "kind", split_column="part")
    assert [int(split.count) for split in (who.train, who.val, who.test)] == [10, 5, 5]
    assert who.test.rows.tolist() == [2, 6, 10, 14, 18]


def test_a_newcomer_without_held_out_examples_is_served_but_not_judged(from_table: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "new.csv", [1], 1)
    found = adopt(from_table, newcomer_from_table(from_table, table, "kind"), "fedavg")
    assert (found.n_train, found.n_test) == (1, 0)
    assert found.adopted is None
    assert found.alone is None


def test_examples_of_a_shape_are_read_from_flat_columns(tmp_path: Path) -> None:
    run(
        dataset="digits",
        clients=4,
        model="mlr",
        rounds=1,
        seeds=(0,),
        algorithms="fedavg",
        out=tmp_path / "run",
        workers=1,
    )
    shape = FinishedRun.open(tmp_path / "run").shape
    table = tmp_path / "new.csv"
    names = ",".join(f"p{i}" for i in range(64))
    table.write_text(f"{names},digit\n" + (",".join("8" for _ in range(64)) + ",7\n") * 8)
    who = newcomer_from_table(tmp_path / "run", table, "digit")
    assert who.features.shape == shape
    assert who.labels.tolist() == [7] * 8
    assert adopt(tmp_path / "run", who).n_train == 6


def test_tokens_stay_whole_numbers(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 9, (24, 3))
    data = Federation.from_arrays(words, words[:, 0] % 2, np.arange(24) % 3, tokens=True)
    build = lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))  # noqa: E731
    run(
        algorithms="fedavg",
        rounds=1,
        steps=1,
        seeds=(0,),
        out=tmp_path / "run",
        federation=data,
        model=build,
        workers=1,
    )
    table = tmp_path / "new.csv"
    table.write_text("a,b,c,y\n" + "1,2,3,0\n4,5,6,1\n" * 4)
    who = newcomer_from_table(tmp_path / "run", table, "y")
    assert who.features.is_tokens
    assert adopt(tmp_path / "run", who, model=build).n_train == 6
    table.write_text("a,b,c,y\n1.5,2,3,0\n")
    with pytest.raises(DataError, match="not whole"):
        newcomer_from_table(tmp_path / "run", table, "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "f0,f1,f2,f3,f4,f5,kind\n1,2,3,4,5,6,z\n",
            "the class 'z', which is unknown; known classes are a, b, c, d",
        ),
        ("f0,f1,f2,f3,kind\n1,2,3,4,a\n", "lacks 2 of the models' 6 columns: f4, f5"),
        ("f0,f1,f2,f3,f4,f5,y\n1,2,3,4,5,6,a\n", "no column 'kind'"),
        (
            "f0,f1,f2,f3,f4,f5,kind\n1,2,3,4,five,6,a\n",
            r"column f4 of .* should hold numbers; 1 of 1 cells hold none, the first in row 1 \('five'\)",
        ),
        ("f0,f1,f2,f3,f4,f5,kind\n", "no rows"),
    ],
)
def test_tables_that_do_not_fit_are_refused(from_table: Path, tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "new.csv"
    table.write_text(text)
    with pytest.raises(KinfedError, match=message):
        newcomer_from_table(from_table, table, "kind")


def test_another_number_of_features_is_refused(in_order: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("a,b,y\n1,2,0\n")
    with pytest.raises(DataError, match=r"takes 6 features .* has 2"):
        newcomer_from_table(in_order, table, "y")


# What is refused besides.


def test_bad_requests(in_order: Path, from_table: Path) -> None:
    with pytest.raises(ConfigError, match="choose one with --algorithm"):
        adopt(in_order, newcomer(), model=tiny)
    with pytest.raises(ConfigError, match="no algorithm 'cgpf'"):
        adopted(in_order, "cgpf")
    with pytest.raises(ConfigError, match="fedmd uses public examples"):
        adopted(in_order, "fedmd")
    with pytest.raises(ConfigError, match="no seed '8'"):
        adopted(in_order, "cgpfl", seed=8)
    with pytest.raises(ConfigError, match="at least one round; got 0"):
        adopted(in_order, "cgpfl", rounds=0)
    with pytest.raises(ConfigError, match="one client joins at a time; got a federation of 9"):
        adopted(in_order, "cgpfl", federation())
    with pytest.raises(ConfigError, match="no groups"):
        adopted(in_order, "cgpfl", group="phone")
    wide = Federation.from_arrays(np.zeros((4, 2)), [0, 1, 2, 3], [0] * 4)
    with pytest.raises(ConfigError, match=r"shape \[6\] for classification, 4 classes; the newcomer has shape \[2\]"):
        adopted(in_order, "cgpfl", wide)
    with pytest.raises(ModelError, match="model mlp, which the configuration names, has other parameters"):
        adopt(in_order, newcomer(), "cgpfl")
    with pytest.raises(ModelError, match="the model given has other parameters"):
        adopt(from_table, newcomer(), "cgpfl", model=tiny)


def test_features_that_blow_up_training_are_named(from_table: Path) -> None:
    x, y = examples(0, 8, 1)
    with pytest.raises(DataError, match="diverged"):
        adopt(from_table, Federation.from_arrays(1e30 * x, y, [0] * 8, num_classes=CLASSES), "fedavg")


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    from kinfed.runs.method_run import Interrupted

    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        run(
            algorithms="fedavg,ditto", rounds=4, steps=1, seeds=(0,), out=tmp_path / "run", federation=federation(3),
            model=tiny, workers=1, should_stop=lambda: next(asked, True),
        )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"fedavg-0 has reached round \d of 4; finish the run first: kinfed run --out"
    ):
        adopted(tmp_path / "run", "fedavg")
    with pytest.raises(ConfigError, match="ditto-0 has not begun"):
        adopted(tmp_path / "run", "ditto")


def test_groups_matter_where_the_method_says_so(tmp_path: Path) -> None:
    run(
        algorithms="fedavg,selffl_cluster", rounds=3, participation=1.0, steps=3, seeds=(0,), out=tmp_path / "run",
        federation=federation(6, groups=True), model=tiny, eval_every=0, workers=1,
    )  # fmt: skip
    folder = tmp_path / "run"
    assert adopted(folder, "fedavg").place == ""
    with pytest.raises(
        ConfigError, match="tells clients apart by group; say which group the newcomer is in: phone, watch"
    ):
        adopted(folder, "selffl_cluster")
    with pytest.raises(ConfigError, match="no group 'clock'; it has phone, watch"):
        adopted(folder, "selffl_cluster", group="clock")
    opened = FinishedRun.open(folder)
    made, task = opened.algorithm("selffl_cluster"), opened.task(tiny)
    for number, group in enumerate(("phone", "watch")):
        server: Any = with_newcomer(opened, "selffl_cluster", made, task, group)
        assert server.group.tolist() == [0, 1, 0, 1, 0, 1, number]
    assert adopted(folder, "selffl_cluster", group="watch").adopted is not None


# Use.


def test_the_model_is_a_plain_state_dict(in_order: Path, tmp_path: Path) -> None:
    found = adopted(in_order, "cgpfl")
    found.save(in_order, tmp_path / "mine.safetensors")
    module = tiny()
    module.load_state_dict(load_file(tmp_path / "mine.safetensors"))
    task = make_task(tiny)
    x: Tensor = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x), task.logits(found.model[None], x[None])[0])


def test_the_command(from_table: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "new.csv", [10], 40)
    mine = tmp_path / "mine.safetensors"
    command = ["adopt", str(from_table), "--table", str(table), "--label-column", "kind", "--algorithm", "cgpfl"]
    result = CliRunner().invoke(app, [*command, "-o", str(mine), "--rounds", "2"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "30 training examples, 2 rounds of local training; judged on 10 held-out examples" in text
    assert "in server model" in text
    for row in ("alone", "server's model", "adopted"):
        assert f"{row} " in text
    assert load_file(mine)["1.weight"].shape == (4, 6)


def test_a_run_in_memory_takes_newcomers_as_its_folder_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithms": "ditto,fedfomo,kin", "rounds": 2, "participation": 1.0, "steps": 2, "seeds": (0,),
        "eval_every": 0, "federation": federation(4), "model": tiny, "workers": 1,
    }  # fmt: skip
    run(**settings, out=tmp_path / "run")
    in_memory = RunInMemory.of_result(run(**settings))
    for method in ("ditto", "fedfomo", "kin"):
        ours, theirs = (adopt(one, newcomer(), method, model=tiny) for one in (in_memory, tmp_path / "run"))
        assert torch.equal(ours.model, theirs.model), method
        assert ours.adopted == theirs.adopted


def test_weights_of_a_newcomers_rows(from_table: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "new.csv", [1], trust=lambda _, row: 1 + row % 3)
    weighted = newcomer_from_table(from_table, table, "kind", weight_column="trust")
    assert weighted.weights is not None
    assert float(weighted.weights[weighted.train.rows].mean()) == pytest.approx(1)
    plain = newcomer_from_table(from_table, table, "kind", ignore="trust")
    assert torch.equal(weighted.features.raw, plain.features.raw)
    assert not torch.equal(adopt(from_table, weighted, "fedavg").model, adopt(from_table, plain, "fedavg").model)
