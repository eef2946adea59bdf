"""Random operations inside models depend on (seed, stream, round, client, step) only, not on threads or chunks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conftest import MakeBatch
from kinfed.core import rng
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.rows import keyed_random as random_operations
from kinfed.engine.rows.keyed_random import MANY_VALUES, Draws, KeyedDraws
from kinfed.engine.task_factory import RowsTask, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ModelError


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.4)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Everything(nn.Module):
    """One of each kind of draw that torch offers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.drop = nn.Sequential(nn.Dropout(0.2), nn.AlphaDropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(x.flatten(1)[:, :6])
        if self.training:
            f = nn.functional
            h = h + torch.randn(h.shape) * 0.1 + torch.rand_like(h) + torch.randn_like(h)
            h = f.rrelu(h, training=True) + f.dropout(h, 0.1) + f.feature_alpha_dropout(h, 0.1, training=True)
            h = h * torch.bernoulli(torch.full_like(h, 0.9)) + f.gumbel_softmax(h)
            h = h[:, torch.randperm(6)] + torch.normal(torch.zeros_like(h), 0.1) + torch.empty_like(h).uniform_()
            h = h + torch.randint(0, 2, h.shape) + torch.multinomial(torch.ones(6), 1)
        return self.fc(h)


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def wide() -> nn.Module:
    """Masks of many values."""
    return nn.Sequential(nn.Flatten(), nn.Linear(24, MANY_VALUES), nn.Dropout(0.3), nn.Linear(MANY_VALUES, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dense": dense, "wide": wide, "encoder": Encoder, "lstm": Recurrent, "everything": Everything,
}  # fmt: skip
SHAPE = (4, 6)


@pytest.fixture
def sequences() -> Federation:
    """Five clients of 3 to 9 sequences [4, 6]."""
    draw = torch.Generator().manual_seed(3)
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor([9, 3, 7, 5, 8]))
    x = torch.randn(len(owner), *SHAPE, generator=draw)
    y = torch.randint(0, 3, (len(owner),), generator=draw)
    return Federation.from_arrays(x.numpy(), y.numpy(), owner.numpy(), test_fraction=0.2, num_classes=3)


@pytest.mark.parametrize("name", MODULES)
def test_training_is_equal_for_any_threads_chunks_and_order(sequences: Federation, name: str) -> None:
    task, training = make_task(MODULES[name]), LocalTraining(lr=0.1, batch=4, steps=None, epochs=2)
    assert task.backend == "rows"

    def train(ids: list[int], round: int = 3, seed: int = 1) -> Tensor:
        part = sequences.cohort(torch.tensor(ids), seed, round).train
        return sgd(task, task.init(0).expand(len(ids), -1), part.batches(training))

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    together = train([0, 1, 2, 3, 4])
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's generator is left alone
    torch.manual_seed(1)
    for chunks in ([[4, 2], [0, 1, 3]], [[0], [1], [2], [3], [4]]):
        with ThreadPoolExecutor(3) as threads:
            parts = list(threads.map(train, chunks))
        for ids, part in zip(chunks, parts, strict=True):
            assert torch.equal(part, together[ids])
    assert not torch.equal(train([0], round=4), together[:1])
    assert not torch.equal(train([0], seed=2), together[:1])


@pytest.mark.parametrize("name", MODULES)
def test_evaluation_draws_nothing(make_batch: MakeBatch, name: str) -> None:
    task, batch = make_task(MODULES[name]), make_batch(2, 3, SHAPE, 3)
    theta = task.init(0).expand(2, -1)
    z = task.logits(theta, batch.x)
    torch.testing.assert_close(z[1], task.module_of(theta[1])(batch.x[1]).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(z, task.logits(theta, batch.x))


def same_examples(batch: Batch, **changes: object) -> Batch:
    return replace(batch, x=batch.x[:1].expand_as(batch.x), y=batch.y[:1].expand_as(batch.y), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODULES)
def test_clients_steps_and_streams_draw_their_own(make_batch: MakeBatch, name: str) -> None:
    task, batch = make_task(MODULES[name]), same_examples(make_batch(2, 4, SHAPE, 3), seed=5, stream="batches")
    theta = task.init(0).expand(2, -1)
    g = task.grad(theta, batch)
    assert not torch.equal(g[0], g[1])
    assert torch.equal(task.grad(theta, batch), g)  # a batch draws what it drew before
    for other in ({"step": 1}, {"round": 1}, {"stream": "finetune"}, {"seed": 6}):
        assert not torch.equal(task.grad(theta, replace(batch, **other))[0], g[0])


def hits_of_mt19937(word: int, count: int, p: float) -> Tensor:
    """By numpy's Mersenne Twister: two outputs make a number of 53 bits, as in torch's own generator."""
    generator = np.random.MT19937()
    generator._legacy_seeding(word % 2**32)
    high, low = generator.random_raw(2 * count).reshape(count, 2).T
    unit = ((high % 2**21) * 2**32 + low) / 2.0**53
    return torch.from_numpy((unit < p).astype(np.float32))


def test_small_masks_are_those_of_torchs_generator_on_every_processor(make_batch: MakeBatch) -> None:
    """The oracle is not `bernoulli_`, which draws otherwise on processors of Intel."""
    task, batch = make_task(dense), make_batch(1, 4, SHAPE, 3)
    row = task.init(0)
    g = task.grad(row[None], replace(batch, seed=7, stream="s", round=2, step=3))
    key = rng.fold_number(int(rng.root(7, "draws-s")), 2, int(batch.ids[0]), 3)
    mask = hits_of_mt19937(rng.fold_number(key, 0), 4 * 16, 0.5).view(4, 16) / 0.5
    module = task.module_of(row).train()
    below, above = module[:3], module[4]
    nn.functional.cross_entropy(above(below(batch.x[0]) * mask), batch.y[0]).backward()
    wanted = task.flatten({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    torch.testing.assert_close(g[0], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
def test_small_draws_of_any_type_are_the_same(make_batch: MakeBatch, p: float, dtype: torch.dtype) -> None:
    batch = make_batch(1, 4, SHAPE, 3)
    key = rng.fold_number(int(rng.root(7, "draws-s")), 2, int(batch.ids[0]), 3)
    hits = hits_of_mt19937(rng.fold_number(key, 0), 60, p).view(3, 20)
    assert torch.equal(started(batch).bernoulli_(torch.empty(3, 20, dtype=dtype), p), hits.to(dtype))
    turned = torch.empty(20, 3).T  # numbers belong to places in memory, as torch draws them
    assert torch.equal(started(batch).bernoulli_(turned, p), hits.view(20, 3).T)
    if dtype.is_floating_point and 0 < p < 1:
        mask = started(batch).dropout_mask(torch.empty(3, 20, dtype=dtype), p)
        assert torch.equal(mask, hits.to(dtype).div_(p))


def started(batch: Batch) -> Draws:
    draws = Draws(torch.device("cpu"))
    draws.begin(replace(batch, seed=7, stream="s", round=2, step=3), 0)
    return draws


def test_masks_are_the_same_whichever_were_drawn_before(make_batch: MakeBatch) -> None:
    """They are drawn for some steps ahead; other clients, steps, rounds, shapes and rates come in between."""
    batch = replace(make_batch(3, 4, SHAPE, 3), seed=7, stream="s", round=2)
    rest = [{"steps_ahead": 20 - step} for step in range(21)]
    widths = (20, MANY_VALUES // 4 + 1, 5 * MANY_VALUES)
    steps = [(row, step, rest[step], width, 0.7) for width in widths for row in (0, 2) for step in range(21)]
    steps += [
        (row, step, {"steps_ahead": 50}, 20, 0.7) for row in (0, 2) for step in (*range(40), 3, 2, 40, 41, 42, 41)
    ]
    steps += [(row, step, {}, 20, 0.7) for step in range(3) for row in range(3)]
    steps += [(1, step, rest[0], width, 0.7) for step, width in enumerate((20, 20, 8, 20, MANY_VALUES, 20, 20, 20))]
    steps += [(1, step, rest[0], 20, keep) for step, keep in enumerate((0.7, 0.5, 0.5, 0.7, 0.7))]
    steps += [(1, step, {"round": step // 4, "stream": "st"[step % 2]}, 20, 0.7) for step in range(12)]
    steps += [(1, step, {"ids": batch.ids.flip(0)}, 20, 0.7) for step in range(3)]
    draws = Draws(torch.device("cpu"))
    changes: dict[str, Any]
    for row, step, changes, width, keep in steps:
        one, fresh = replace(batch, step=step, **changes), Draws(torch.device("cpu"))
        draws.begin(one, row)
        fresh.begin(one, row)
        for x in (torch.empty(4, width), torch.empty(4, 5), torch.empty(5, 4).T):
            ours = draws.dropout_mask(x, keep)
            assert ours.shape == x.shape
            assert torch.equal(ours, fresh.bernoulli_(torch.empty_like(x), keep).div_(keep))


def test_large_masks_are_those_of_sfc64(make_batch: MakeBatch) -> None:
    batch = make_batch(1, 4, SHAPE, 3)
    mask = started(batch).bernoulli_(torch.empty(3, MANY_VALUES), 0.7)
    key = rng.fold_number(int(rng.root(7, "draws-s")), 2, int(batch.ids[0]), 3)
    word = rng.fold_number(key, 0) % 2**64
    state = [word, word, word, 1]  # a, b, c and the counter, as in the generator's reference

    def output() -> int:
        a, b, c, counter = state
        out = (a + b + counter) % 2**64
        state[:] = b ^ (b >> 11), (c + (c << 3)) % 2**64, ((c << 24 | c >> 40) + out) % 2**64, counter + 1
        return out

    for _ in range(12):
        output()
    bits = [half for _ in range(50) for out in [output()] for half in (out % 2**32, out >> 32)]
    signed = [x - 2**32 if x >= 2**31 else x for x in bits]
    assert mask.flatten()[:100].tolist() == [float((x + 2**31) / 2**32 < 0.7) for x in signed]
    assert abs(float(mask.mean()) - 0.7) < 4 * (0.21 / mask.numel()) ** 0.5


@pytest.mark.parametrize("count", [10, MANY_VALUES])
def test_masks_belong_to_positions_and_have_any_type(make_batch: MakeBatch, count: int) -> None:
    batch, shape = make_batch(1, 4, SHAPE, 3), (2, 3, count, 5)
    wanted = started(batch).bernoulli_(torch.empty(shape), 0.3)
    assert set(wanted.unique().tolist()) == {0.0, 1.0}
    if count == MANY_VALUES:
        last = torch.empty(shape).to(memory_format=torch.channels_last)
        assert torch.equal(started(batch).bernoulli_(last, 0.3), wanted)
        assert torch.equal(started(batch).bernoulli_(torch.empty(shape, dtype=torch.bfloat16), 0.3).float(), wanted)
    for p in (0.0, 1.0):
        assert torch.equal(started(batch).bernoulli_(torch.empty(shape), p), torch.full(shape, p))


def test_padding_does_not_shift_draws(make_batch: MakeBatch) -> None:
    task, batch = make_task(Encoder), make_batch(1, 4, SHAPE, 3)
    padded = replace(
        batch,
        x=torch.cat([batch.x, batch.x], 1),
        y=torch.cat([batch.y, batch.y], 1),
        weight=torch.cat([batch.weight, torch.zeros_like(batch.weight)], 1),
    )
    theta = task.init(0)[None]
    assert torch.equal(task.grad(theta, batch), task.grad(theta, padded))


def test_a_plain_number_folds_like_a_tensor() -> None:
    for key, value in ((0, 0), (5, -1), (-(2**63), 2**63 - 1), (123456789, 42)):
        assert rng.fold_number(key, value, 7) == int(rng.fold(key, value, 7))


@pytest.mark.parametrize("name", ["encoder", "lstm", "everything"])
def test_both_ways_of_catching_draw_the_same(make_batch: MakeBatch, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(2, 4, SHAPE, 3)

    def gradient() -> Tensor:
        task = make_task(MODULES[name])
        return task.grad(task.init(0).expand(2, -1), batch)

    by_kernels = gradient()
    monkeypatch.setattr(random_operations, "_kernels_are_there", lambda: False)  # as with torch 2.6
    assert torch.equal(gradient(), by_kernels)


class Late(nn.Module):
    """Begins to draw in the second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.fc(x[:, 0] if self.passes == 1 else nn.functional.dropout(x[:, 0], 0.5, self.training))


def test_who_did_not_draw_at_first_is_caught_later(make_batch: MakeBatch) -> None:
    task, batch = make_task(Late, backend="rows"), make_batch(1, 4, SHAPE, 3)
    theta = task.init(0)[None]
    first = task.grad(theta, batch)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    second = task.grad(theta, batch)
    assert not torch.equal(first, second)
    assert torch.equal(task.grad(theta, batch), second)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_other_threads_draw_as_ever_meanwhile(make_batch: MakeBatch) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with KeyedDraws(started(make_batch(1, 4, SHAPE, 3))), ThreadPoolExecutor(1) as other:
        torch.rand(3)
        assert torch.equal(other.submit(torch.rand, 3).result(), wanted)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), wanted)


def test_scripted_functions_are_caught(make_batch: MakeBatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        drop = torch.jit.script(nn.Dropout(0.5))
    with KeyedDraws(started(make_batch(1, 4, SHAPE, 3))) as caught:
        drop(torch.ones(4, 4))
    assert caught.operations == {"dropout"}


class Checkpointed(nn.Module):
    """Repeats its forward on the way back, where it would draw anew."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x[:, 0])
        out: Tensor = checkpoint(lambda value: nn.functional.dropout(value, 0.5), h, use_reentrant=False)
        return out


class Uncontrolled(nn.Module):
    """`poisson_nll`-like sampling without a generator: a binomial draw."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch._sample_dirichlet(x[:, 0].abs() + 1))


def test_draws_on_the_way_back_are_refused_by_name(make_batch: MakeBatch) -> None:
    task = make_task(Checkpointed, backend="rows")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"torch\.dropout.*checkpoint"):
            task.grad(task.init(0)[None], make_batch(1, 4, SHAPE, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_with_a_padding_mask_is_evaluated_by_torchs_own_shortcut() -> None:
    """In evaluation nn.TransformerEncoder leaves padding out by an operation that torch marks as drawing."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 6)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2)
            self.fc = nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            padded = tokens == 0
            h = self.encoder(self.words(tokens), src_key_padding_mask=padded)
            return self.fc(h.masked_fill(padded[..., None], 0.0).mean(1))

    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]])
    task = make_task(Masked, example=tokens, outputs=3)
    row = task.init(0)
    with torch.no_grad():
        wanted = task.module_of(row)(tokens)
    torch.testing.assert_close(task.logits(row[None], tokens[None])[0], wanted)


def test_private_operations_draw_by_key_too(make_batch: MakeBatch) -> None:
    task = make_task(Uncontrolled, backend="rows")
    batch = same_examples(make_batch(2, 4, SHAPE, 3), seed=5)
    g = task.grad(task.init(0).expand(2, -1), batch)
    assert torch.equal(g, task.grad(task.init(0).expand(2, -1), batch))
    assert not torch.equal(g[0], g[1])


def test_whether_a_model_draws_is_known_after_its_first_step(make_batch: MakeBatch) -> None:
    for build, wanted in ((dense, True), (Encoder, True), (Recurrent, True), (lambda: nn.Flatten(), None)):
        if wanted is None:
            continue
        task = make_task(build)
        assert isinstance(task, RowsTask)
        task.grad(task.init(0)[None], make_batch(1, 2, SHAPE, 3))
        assert task.draws_randomly is wanted
    still = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), backend="rows")
    assert isinstance(still, RowsTask)
    assert still.draws_randomly is None
    still.grad(still.init(0)[None], make_batch(1, 2, SHAPE, 3))
    assert still.draws_randomly is False


def test_dropout_of_accelerators_has_the_masks_of_any_other(make_batch: MakeBatch) -> None:
    """Torch's `dropout` is another operation there, which draws and multiplies at once."""
    x, batch = torch.rand(3, 5, requires_grad=True), make_batch(1, 3, (5,), 2)

    def dropped(function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        draws = Draws(torch.device("cpu"))
        draws.begin(batch, 0)
        with KeyedDraws(draws):
            out = function(x, 0.4, True)
        out = out[0] if isinstance(out, tuple) else out
        return out, torch.autograd.grad(out.sum(), x)[0]

    for ours, theirs in zip(dropped(torch.native_dropout), dropped(torch.dropout), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_fused_attention_of_accelerators_drops_by_key(kind: str, causal: bool, make_batch: MakeBatch) -> None:
    """Their kernels draw by themselves. What takes their place is called here by hand, beside torch's own steps with
    the same masks; that an accelerator calls it was not seen here."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3))
    bias = None if kind == "flash" or causal else torch.randn(4, 4)
    batch = make_batch(1, 3, (5,), 2)

    def attended(fused: bool) -> tuple[Tensor, ...]:
        draws = Draws(torch.device("cpu"))
        draws.begin(batch, 0)
        with KeyedDraws(draws) as keyed:
            if fused:
                operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
                between = () if kind == "flash" else (bias, True)
                out = keyed.call(operation, (q, k, v, *between, 0.3, causal), {})
                assert len(out) == len(operation._schema.returns)
                out = out[0]
            else:
                out = nn.functional.scaled_dot_product_attention(q, k, v, bias, 0.3, causal)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    for ours, theirs in zip(attended(True), attended(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
