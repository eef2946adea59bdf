"""Codecs: what arrives is what the codes say, on average what was sent, in as many bytes as the formulas say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.core.bitpack import pack_numbers, unpack_numbers
from kinfed.errors import ConfigError
from kinfed.updates.codecs import CODECS, QSGD, Codec, TopK, largest


def keys(count: int, seed: int = 0) -> Tensor:
    return rng.fold(rng.root(seed, "codecs"), torch.arange(count))


def rows(n: int, d: int) -> Tensor:
    return rng.normal(keys(n, 1), d).float()


@pytest.mark.parametrize("width", [1, 3, 7, 15])
def test_packed_numbers_come_back(width: int) -> None:
    numbers = rng.bits(keys(3), 21).remainder(2**width)
    code = pack_numbers(numbers, width)
    assert code.shape == (3, math.ceil(21 * width / 8))
    assert torch.equal(unpack_numbers(code, 21, width), numbers)


@pytest.mark.parametrize("d", [1, 2, 7, 600, 1024, 1025])
@pytest.mark.parametrize(
    "codec", [QSGD(levels=1), QSGD(levels=7, bucket=5), QSGD(levels=300, norm="l2"), TopK(0.01), TopK(0.1), TopK(0.5)]
)
def test_codes_have_the_stated_size_and_rows_do_not_matter_to_each_other(codec: Codec, d: int) -> None:
    x, key = rows(4, d), keys(4)
    code = codec.encode(x, key)
    assert code.dtype == torch.uint8
    assert code.shape == (4, codec.nbytes(d))
    again = codec.decode(code, d)
    assert again.shape == x.shape
    assert torch.equal(codec.encode(x[2:3], key[2:3]), code[2:3])
    # What arrived is a value that the codec can say: of top-k exactly.
    if isinstance(codec, TopK):
        assert torch.equal(codec.decode(codec.encode(again, key), d), again)


def test_qsgd_by_hand() -> None:
    """v = (3, 4), s = 1, 2-norm: 5 with the chances 0.6 and 0.8. Two numbers of 2 bits and a norm: 5 bytes."""
    codec = QSGD(levels=1, norm="l2", bucket=2)
    assert codec.nbytes(2) == 5
    key = keys(4000)
    arrived = codec.decode(codec.encode(torch.tensor([[3.0, 4.0]]).expand(4000, 2), key), 2)
    assert set(arrived.unique().tolist()) == {0.0, 5.0}
    share = (arrived == 5).double().mean(0)
    error = (0.25 / 4000) ** 0.5
    assert torch.allclose(share, torch.tensor([0.6, 0.8], dtype=torch.float64), atol=4 * error)
    u = rng.uniform(key, 2)
    assert torch.equal(arrived == 5, torch.stack([u[:, 0] >= 1 - 3 / 5, u[:, 1] >= 1 - 4 / 5], 1))


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_is_unbiased_with_the_variance_of_the_theorem(norm: str) -> None:
    s, d, draws = 3, 40, 4000
    codec = CODECS["qsgd"].make({"levels": s, "bucket": d, "norm": norm})
    v = rows(1, d)
    arrived = codec.decode(codec.encode(v.expand(draws, d), keys(draws)), d).double()
    error = arrived.std(0) / draws**0.5
    gap = (arrived.mean(0) - v[0].double()).abs()
    assert bool((gap <= 4.5 * error + 1e-6).all())
    square = v.double().square().sum()
    variance = (arrived - v.double()).square().sum(1).mean()
    if norm == "l2":
        assert variance <= min(d / s**2, d**0.5 / s) * square  # Lemma 3.1
    else:
        assert float((arrived - v.double()).abs().max()) <= float(v.abs().max()) / s + 1e-6


def test_a_code_is_no_longer_than_its_numbers_need() -> None:
    """The defaults too: seven levels in 4 bits, a norm for 512 numbers; one number in a hundred."""
    assert [QSGD(levels=levels).width for levels in (1, 7, 8, 32767)] == [2, 4, 5, 16]
    assert QSGD().nbytes(512) == 4 + 256
    assert QSGD().nbytes(513) == 2 * 4 + 257
    assert TopK().nbytes(1000) == 10 * 4 + math.ceil(10 * 10 / 8)
    for d, share in ((60, 0.02), (66, 0.02), (71, 0.02), (72, 0.02), (100, 0.12), (100, 0.15)):
        codec, k = TopK(share), math.ceil(share * d)
        indices, bits = math.ceil(k * (d - 1).bit_length() / 8), math.ceil(d / 8)
        assert codec.encode(rows(1, d), keys(1)).shape[1] == 4 * k + min(indices, bits)


def test_who_rounds_at_random_is_right_on_average_and_who_leaves_out_is_not() -> None:
    x = rows(1, 40).expand(4000, 40)
    for codec in (QSGD(levels=2, bucket=40), TopK(0.2)):
        arrived = codec.decode(codec.encode(x, keys(4000)), 40).mean(0)
        assert codec.unbiased == bool(((arrived - x[0]).abs() < 0.1).all())


def test_buckets_of_one_number_say_it_exactly() -> None:
    codec = QSGD(levels=3, bucket=1)
    x = rows(2, 9)
    assert torch.equal(codec.decode(codec.encode(x, keys(2)), 9), x)


def test_zeros_and_the_largest_number_are_exact() -> None:
    codec = QSGD(levels=4, bucket=3)
    x = torch.tensor([[0.0, -2.0, 0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(codec.decode(codec.encode(x, keys(1)), 6), x)


def test_top_k_takes_the_largest_and_of_equals_the_first() -> None:
    x = torch.tensor([[1.0, -3.0, 2.0, -2.0, 3.0, 2.0]])
    assert largest(x.abs(), 3).tolist() == [[False, True, True, False, True, False]]
    codec = TopK(0.5)
    assert codec.decode(codec.encode(x, keys(1)), 6).tolist() == [[0.0, -3.0, 2.0, 0.0, 3.0, 0.0]]
    assert codec.nbytes(6) == 3 * 4 + 1  # a bit for each of six numbers is shorter than three indices of 3 bits
    assert TopK(0.001).nbytes(10_000) == 10 * 4 + math.ceil(10 * 14 / 8)  # ten indices of 14 bits
    assert TopK(1 / 128).nbytes(1024) == 8 * 4 + 8 * 10 // 8  # places 0 to 1023 have ten bits
    assert TopK(1.0).nbytes(6) == 24


def test_all_of_a_row_arrives_bit_for_bit() -> None:
    x = rows(3, 11)
    assert torch.equal(TopK(1.0).decode(TopK(1.0).encode(x, keys(3)), 11), x)


@pytest.mark.parametrize(
    ("name", "options"),
    [("qsgd", {"levels": 0}), ("qsgd", {"levels": 32768}), ("topk", {"share": 0.0}), ("topk", {"levels": 3})],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        CODECS[name].make(options)
