"""Private gradients: clipped sums, noise, where it comes from, and what is counted."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import example_gradients
from kinfed.core import rng
from kinfed.data.examples.batches import Batch, LocalTraining, PoissonSample, Split
from kinfed.data.examples.features import Features
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.errors import ConfigError
from kinfed.privacy.dpsgd import EVALUATION, PrivateTask, Record
from kinfed.privacy.ledger import Event
from kinfed.privacy.noise import AnswerDraws, Secret, new_nonce, seeded_noise
from kinfed.testing import tiny_federation

CLASSES = 3


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES, bias=False))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 3, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "stacked": (dense, "stacked", (5,)),
    "rows": (dense, "rows", (5,)),
    "vmap": (dense, "vmap", (5,)),
    "convolutional": (convolutional, "rows", (1, 5, 5)),
}


def sample(n: int, size: int, shape: tuple[int, ...], *, scale: float = 1.0, expected: float = 4.0) -> Batch:
    """A Poisson sample as training batches are: weights 1/expected, the last place of every second row padding."""
    x = scale * rng.normal(rng.root(0, "x"), n * size * torch.Size(shape).numel()).reshape(n, size, *shape)
    y = (rng.uniform(rng.root(0, "y"), n * size) * CLASSES).to(torch.int64).reshape(n, size)
    weight = torch.full((n, size), 1 / expected)
    weight[::2, -1] = 0.0
    sample = PoissonSample(
        rng.fold(rng.root(0, "draw"), torch.arange(n)), torch.full((n,), 0.5).double(), torch.full((n,), expected)
    )
    return Batch(x.float(), y, weight, torch.arange(n), sample=sample)


def starts(task: ModuleTask, n: int) -> Tensor:
    return torch.stack([task.init(0, k) for k in range(n)])


@contextmanager
def private(task: ModuleTask, clip: float = 0.5, noise: float = 0.0, seed: int = 0) -> Iterator[PrivateTask]:
    made = PrivateTask(task, clip, noise, seeded_noise(seed))
    with made.recording():
        yield made


def by_hand(task: ModuleTask, theta: Tensor, batch: Batch, clip: float) -> Tensor:
    """One example after the other by autograd: (1/L) Σ g min(1, c/‖g‖)."""
    assert batch.sample is not None
    out = torch.zeros_like(theta)
    for i in range(len(batch)):
        module = task.module_of(theta[i])
        for b in range(batch.y.shape[1]):
            if batch.weight[i, b] == 0:
                continue
            loss = nn.functional.cross_entropy(module(batch.x[i, b][None]), batch.y[i, b][None])
            g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(loss, list(module.parameters()))])
            out[i] += g * min(1.0, clip / float(g.norm())) / batch.sample.expected[i]
    return out


# ---- clipping ----


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
def test_the_sum_is_that_of_clipped_gradients(kind: str, clip: float) -> None:
    build, path, shape = MODELS[kind]
    task, batch = make_task(build, backend=path), sample(3, 7, shape)
    theta = starts(task, 3)
    with private(task, clip) as made:
        assert torch.allclose(made.grad(theta, batch), by_hand(task, theta, batch, clip), atol=1e-6)
    if clip == 1e6:
        assert torch.allclose(by_hand(task, theta, batch, clip), task.grad(theta, batch), atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_norms_are_those_of_the_gradients(kind: str) -> None:
    build, path, shape = MODELS[kind]
    task, batch = make_task(build, backend=path), sample(3, 4, shape)
    theta = starts(task, 3)
    wanted = example_gradients(task, theta, batch).norm(dim=2)
    assert torch.allclose(task.example_norms(theta, batch), wanted, rtol=1e-5)


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-3, 1.0, 1e3, 1e18, float("inf"), float("nan")]),
    st.sampled_from([1e-3, 1.0, 20.0]),
    st.sampled_from([0.25, 3.0]),
)
def test_no_example_moves_the_sum_by_more_than_the_norm(
    kind: str, n: int, size: int, scale: float, clip: float, heavier: float
) -> None:
    """Whatever it holds, and whatever a method makes it weigh."""
    build, path, shape = MODELS[kind]
    task, batch = make_task(build, backend=path), sample(n, size + 1, shape)
    theta = starts(task, n)
    batch.x[:, 0] *= scale
    batch.weight[:, 0] *= heavier
    without = replace(batch, weight=batch.weight.clone())
    without.weight[:, 0] = 0.0
    assert batch.sample is not None
    with private(task, clip) as made:
        moved = (made.grad(theta, batch) - made.grad(theta, without)) * batch.sample.expected[:, None]
    assert bool((moved.norm(dim=1) <= clip * (1 + 1e-4)).all())
    assert bool(torch.isfinite(moved).all())


def test_examples_without_a_finite_gradient_count_as_zero() -> None:
    task, batch = make_task(dense), sample(2, 3, (5,))
    theta = starts(task, 2)
    rest = replace(batch, weight=batch.weight * torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    expected = by_hand(task, theta, rest, 0.5)
    batch.x[0, 0] = float("nan")
    batch.x[1] = float("inf")
    with private(task) as made:
        assert torch.allclose(made.grad(theta, batch), expected, atol=1e-6)
        assert torch.equal(made.grad(theta * float("nan"), batch), torch.zeros_like(theta))


def test_a_step_takes_the_private_gradient() -> None:
    task, batch = make_task(dense), sample(3, 7, (5,))
    theta, center = starts(task, 3), torch.zeros(3, task.num_params)
    lr = torch.tensor([0.1, 0.2, 0.3])
    moved = theta.clone()
    with private(task, noise=1.0) as made:
        made.descend_(moved, batch, lr, (0.5, center))
    with private(task, noise=1.0) as made:
        g = made.grad(theta, batch)
    assert torch.allclose(moved, theta - lr[:, None] * (g + 0.5 * theta), atol=1e-6)


def test_it_agrees_with_opacus() -> None:
    opacus = pytest.importorskip("opacus", reason="the extra dp is not installed")
    for build, shape in ((dense, (5,)), (convolutional, (1, 5, 5))):
        task, batch = make_task(build), sample(1, 6, shape, expected=5.0)
        batch.weight.fill_(1 / 5.0)
        theta = starts(task, 1)
        module = task.module_of(theta[0]).train()
        wrapped = opacus.GradSampleModule(module)
        optimizer = opacus.optimizers.DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=0.3),
            noise_multiplier=0.0,
            max_grad_norm=0.4,
            expected_batch_size=5,
        )
        x = batch.x[0].requires_grad_()  # or torch warns of opacus' hooks
        nn.functional.cross_entropy(wrapped(x), batch.y[0]).backward()
        batch.x = batch.x.detach()
        optimizer.step()
        with private(task, clip=0.4) as made:
            made.descend_(theta, batch, 0.3)
        assert torch.allclose(theta[0], task.flatten(dict(module.named_parameters())), atol=1e-5)
        assert not torch.allclose(theta[0], task.init(0), atol=1e-3)


# ---- noise ----


def noise_of(
    task: ModuleTask, batch: Batch, noise: float = 1.5, seed: int = 0, phase: int = 0, calls: int = 1
) -> Tensor:
    """What is added to the clipped gradient, [calls, n, P]."""
    made = PrivateTask(task, 0.5, noise, seeded_noise(seed))
    theta = starts(task, len(batch))
    with private(task) as silent, made.recording(phase):
        return torch.stack([made.grad(theta, batch) - silent.grad(theta, batch) for _ in range(calls)])


def test_noise_has_the_promised_size() -> None:
    """Standard deviation σ c / L, for each client's own L; mean 0; normal shape."""
    task = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 2000)))
    batch = replace(sample(2, 3, (5,)), y=torch.zeros(2, 3, dtype=torch.int64))
    assert batch.sample is not None
    batch.sample.expected = torch.tensor([4.0, 10.0])
    for row, expected in zip(noise_of(task, batch)[0], (4.0, 10.0), strict=True):
        z = (row * expected / (1.5 * 0.5)).double()
        count = len(z)
        assert abs(float(z.mean())) < 4 / count**0.5
        assert abs(float(z.square().mean()) - 1) < 4 * (2 / count) ** 0.5
        assert abs(float((z.abs() < 1).double().mean()) - 0.6827) < 4 * (0.6827 * 0.3173 / count) ** 0.5
        assert abs(float((z.abs() > 3).double().mean()) - 0.0027) < 4 * (0.0027 / count) ** 0.5


def test_every_gradient_has_noise_of_its_own() -> None:
    """Of another call, client, sample, seed or phase; the same again for the same gradient."""
    task = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 400)))
    batch = replace(sample(2, 3, (5,)), y=torch.zeros(2, 3, dtype=torch.int64))
    assert batch.sample is not None
    other = replace(batch, sample=replace(batch.sample, key=batch.sample.key + 1))
    rows = torch.cat([
        *noise_of(task, batch, calls=3), *noise_of(task, other), *noise_of(task, batch, seed=1),
        *noise_of(task, batch, phase=EVALUATION),
    ])  # fmt: skip
    alike = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(alike.abs().max()) < 5 / rows.shape[1] ** 0.5
    assert torch.equal(noise_of(task, batch, calls=3), noise_of(task, batch, calls=3))


def test_an_empty_sample_is_noise_alone() -> None:
    task, batch = make_task(dense), sample(2, 3, (5,))
    empty = replace(batch, weight=torch.zeros_like(batch.weight))
    with private(task, noise=1.5) as made:
        g = made.grad(starts(task, 2), empty)
    assert torch.allclose(g, noise_of(task, batch)[0], atol=1e-6)
    assert float(g.abs().min()) > 0


@pytest.mark.parametrize("width", [1, 2, 7, 2 * 32768 + 3])
def test_simulated_noise_is_the_usual_normal_draw(width: int) -> None:
    name = torch.tensor([3, -5])
    expected = rng.normal(rng.fold(rng.root(9, "dp-noise"), name), width).float()
    assert torch.equal(seeded_noise(9)(name, torch.zeros(2, width)), expected)


# ---- secrets ----


def test_a_secret_replaces_the_seed() -> None:
    """Another model, name, secret, question or nonce gets independent noise."""

    def draws(secret: bytes = b"1", question: bytes = b"q", nonce: bytes = b"n") -> AnswerDraws:
        return Secret(secret * 32).draws(question, nonce * 32)

    name, theta = torch.tensor([4, 5]), torch.zeros(2, 5001)
    z = draws().noise(name, theta)
    assert torch.equal(z, draws().noise(name, theta))
    near = theta.clone()
    near[:, 7] = 1e-30
    others = [draws(secret=b"2"), draws(question=b"r"), draws(nonce=b"m")]
    rows = torch.cat([
        z, draws().noise(name, near), draws().noise(name + 2, theta), *(other.noise(name, theta) for other in others),
    ])  # fmt: skip
    alike = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(alike.abs().max()) < 5 / rows.shape[1] ** 0.5
    assert abs(float(rows.mean())) < 5 / rows.numel() ** 0.5
    assert abs(float(rows.square().mean()) - 1) < 5 * (2 / rows.numel()) ** 0.5


def test_a_secret_hides_which_examples_are_sampled() -> None:
    data = tiny_federation().cohort(torch.arange(6), 0, 1)
    training = LocalTraining(batch=5, steps=3, poisson=True)
    secret = Secret.new()
    hidden, again = (secret.draws(b"q", new_nonce()).with_secret_sampling(data) for _ in range(2))
    keys = [[batch.sample.key.tolist() for _, batch in d.train.batches(training)] for d in (data, hidden, again)]  # type: ignore[union-attr]
    assert keys[0] != keys[1] != keys[2] != keys[0]
    assert (hidden.seed, hidden.val, hidden.test) == (data.seed, data.val, data.test)


def test_secrets_keep_to_themselves() -> None:
    secret = Secret(b"k" * 32)
    assert "kkk" not in repr(secret)
    assert len(Secret.new().key) == 32
    assert Secret.new() != Secret.new()
    assert "\\x" not in repr(secret.draws(b"q", new_nonce()))
    with pytest.raises(ConfigError, match="32 random bytes; got 5"):
        Secret(b"short")
    with pytest.raises(ConfigError, match="a nonce has 32 random bytes; got 5"):
        secret.draws(b"q", b"short")


# ---- what is counted ----


def test_gradients_are_counted_by_client_and_sample() -> None:
    task, batch = make_task(dense), sample(3, 4, (5,))
    assert batch.sample is not None
    theta = starts(task, 3)
    later = replace(batch, sample=replace(batch.sample, key=batch.sample.key + 1))
    made = PrivateTask(task, 1.0, 1.0, seeded_noise(0))
    with made.recording() as record:
        made.grad(theta, batch)
        made.descend_(theta[1:], batch.rows(slice(1, None)), 0.1)
        made.grad(theta[:2], later.rows(slice(0, 2)))
    once, twice = Event(0.5, 1, 1), Event(0.5, 2, 1)
    assert record.ledger().events(3) == [(Event(0.5, 1, 2),), (once, twice), (twice,)]
    assert not record.evaluated_models
    with made.recording() as record:
        made.losses(theta, batch)
    assert record.evaluated_models
    assert record.ledger().events(3) == [(), (), ()]


def test_records_of_two_places_add_up() -> None:
    """Gradients on a sample that both have seen are the sum of theirs; all else is what either knows."""
    one = Record(calls={7: 2, 8: 1}, samples={7: (0, 0.5), 8: (1, 0.25)})
    one.join(Record(calls={7: 3, 9: 4}, samples={7: (0, 0.5), 9: (2, 0.1)}, evaluated_models=True))
    assert one.calls == {7: 5, 8: 1, 9: 4}
    assert one.samples == {7: (0, 0.5), 8: (1, 0.25), 9: (2, 0.1)}
    assert one.evaluated_models
    one.join(Record())
    assert one.evaluated_models


def test_methods_that_look_at_examples_are_seen() -> None:
    task = make_task(dense)
    data = Split(Features(torch.zeros(4, 5)), torch.zeros(4).long(), torch.tensor([0]), torch.tensor([0]),
                torch.tensor([4]), torch.arange(4), 0, 1)  # fmt: skip
    made = PrivateTask(task, 1.0, 1.0, seeded_noise(0))
    for look in (
        lambda: made.logits(starts(task, 1), torch.zeros(1, 2, 5)),
        lambda: made.score(starts(task, 1), data),
        lambda: made.mean_loss(starts(task, 1), data),
    ):
        with made.recording() as record:
            look()
        assert record.evaluated_models


def test_a_second_record_at_the_same_time_is_refused() -> None:
    """Its gradients would be missing from the first one."""
    task, batch = make_task(dense), sample(2, 3, (5,))
    private = PrivateTask(task, 1.0, 1.0, seeded_noise(0))
    with private.recording() as outer:
        private.grad(starts(task, 2), batch)
        with pytest.raises(RuntimeError, match="open already"), private.recording():
            pass
        private.grad(starts(task, 2), batch)
    assert outer.ledger().events(2) == [(Event(0.5, 2, 1),), (Event(0.5, 2, 1),)]
    with private.recording() as record:
        pass
    assert not record.calls


def test_only_poisson_samples_in_a_record() -> None:
    task, batch = make_task(dense), sample(2, 3, (5,))
    made = PrivateTask(task, 1.0, 1.0, seeded_noise(0))
    with pytest.raises(RuntimeError, match="recording"):
        made.grad(starts(task, 2), batch)
    with made.recording(), pytest.raises(ConfigError, match="Poisson sample"):
        made.grad(starts(task, 2), replace(batch, sample=None))


@pytest.mark.parametrize(
    ("clip", "noise", "says"), [(0.0, 1.0, "clipping norm"), (float("inf"), 1.0, "clipping norm"), (1.0, -1.0, "noise")]
)
def test_impossible_mechanisms_are_refused(clip: float, noise: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PrivateTask(make_task(dense), clip, noise, seeded_noise(0))


def test_private_tasks_and_records_travel() -> None:
    made = PrivateTask(make_task(dense), 1.0, 1.0, Secret.new().draws(b"q", new_nonce()).noise)
    theta, batch = made.init(0)[None], sample(1, 3, (5,))
    with made.recording() as record:
        g = made.grad(theta, batch)
    with made.recording():
        there: PrivateTask = pickle.loads(pickle.dumps(made))
    with there.recording():
        assert torch.equal(there.grad(theta, batch), g)
    back: Record = pickle.loads(pickle.dumps(record))
    assert back.ledger() == record.ledger()


def test_poisson_batches_say_which_samples_they_are() -> None:
    """Equal for equal (stream, round, client, step) in any cohort, different for any other."""
    data, training = tiny_federation(), LocalTraining(batch=5, steps=3, poisson=True)
    whole = data.cohort(torch.arange(6), 0, 1).train
    keys = {}
    for stream in ("batches", "meta"):
        for step, (_, batch) in enumerate(whole.batches(training, stream=stream)):
            assert batch.sample is not None
            assert batch.sample.expected.tolist() == [1, 4, 5, 5, 5, 5]
            assert batch.sample.q.tolist() == pytest.approx([1, 1, 5 / 16, 5 / 7, 5 / 13, 5 / 10])
            some = batch.rows(torch.tensor([2, 4]))
            assert some.sample is not None
            assert some.sample.key.tolist() == batch.sample.key[[2, 4]].tolist()
            assert some.sample.q.tolist() == batch.sample.q[[2, 4]].tolist()
            keys |= {(stream, step, client): key for client, key in enumerate(batch.sample.key.tolist())}
    assert len(set(keys.values())) == 2 * 3 * 6
    for step, (_, batch) in enumerate(data.cohort(torch.tensor([4]), 0, 1).train.batches(training)):
        assert batch.sample is not None
        assert batch.sample.key.tolist() == [keys["batches", step, 4]]
    assert all(batch.sample is None for _, batch in whole.batches(LocalTraining(batch=5, steps=2)))
    with pytest.raises(ConfigError, match="epochs"):
        LocalTraining(epochs=1, steps=None, poisson=True)


def test_the_example_in_the_documents_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text("utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "privacy.md", "exec"), names)
    assert isinstance(names["private"], PrivateTask)
