import io
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from kinfed import run
from kinfed.analysis.gain import (
    GainReport,
    estimate_spread,
    gain_from_arrays,
    gain_from_run,
    gain_from_table,
    render,
    summary,
)
from kinfed.errors import ConfigError, DataError
from kinfed.testing import tiny_federation, tiny_model
from kinfed.theory.two_level import TwoLevel

F64 = torch.float64


def column(report: GainReport, name: str) -> Tensor:
    return torch.tensor([getattr(row, name) for row in report.rows], dtype=F64)


def printed(report: GainReport, **options) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render(report, **options))
    return console.file.getvalue()


# ---------------------------------------------------------------- expected errors


def test_three_clients_by_hand():
    # s = variance/n = 1, 1, 3 and s0 = 1, worked out in test_theory: w = 1/2, 1/2, 1/4, S_{-1} = 3/4, INIT is off by
    # 1 + 4/3 = 7/3 about θ_1. Self-FL weighs it 3/7: (4/7)² + (3/7)² 7/3 = 37/49, and claims 4/7. Exact: 3/10, 7/10.
    # θ^G weighs it (3/4)/(5/4) = 3/5: (2/5)² + (3/5)² 7/3 = 1.
    report = gain_from_arrays([0.0, 4.0, 8.0], [10.0, 20.0, 6.0], [10, 20, 2], s0=1.0)
    first = report.rows[0]
    assert (first.client, first.n, first.alone) == ("0", 10, 1.0)
    assert first.paper == pytest.approx(37 / 49, rel=1e-12)
    assert first.paper_claim == pytest.approx(4 / 7, rel=1e-12)
    assert first.exact == pytest.approx(7 / 10, rel=1e-12)
    assert first.saved == pytest.approx(3 / 10, rel=1e-12)
    assert first.one_for_all == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("s0", [0.0, 0.02, 0.6])
@pytest.mark.parametrize("d", [None, 2])
def test_reported_errors_are_those_of_simulated_clients(d, s0):
    """θ_m and single examples are drawn, z_m is their mean, and the four estimates are written out afresh here."""
    g = torch.Generator().manual_seed(5)
    repeats, n, v2 = 60_000, torch.tensor([2, 5, 9, 30]), torch.tensor([0.5, 1.0, 0.3, 0.8], dtype=F64)
    shape = () if d is None else (d,)
    share = 1 if d is None else d  # a trace is spread over d equal coordinates
    theta = math.sqrt(s0 / share) * torch.randn(repeats, 4, *shape, generator=g, dtype=F64) - 3
    z = theta.clone()
    for m in range(4):
        noise = torch.randn(repeats, *shape, int(n[m]), generator=g, dtype=F64).mean(-1)
        z[:, m] += (v2[m] / share) ** 0.5 * noise
    report = gain_from_arrays(z[0], v2, n, s0=s0)

    s = v2 / n
    w = 1 / (s0 + s)
    simulated: dict[str, list[Tensor]] = {"alone": [], "one_for_all": [], "paper": [], "exact": []}
    everyone = sum(w[k] * z[:, k] for k in range(4)) / w.sum()
    for m in range(4):
        S = w.sum() - w[m]
        others = sum(w[k] * z[:, k] for k in range(4) if k != m) / S
        exact = 1 / (s0 + 1 / S)
        simulated["alone"].append(z[:, m])
        simulated["one_for_all"].append(everyone)
        simulated["paper"].append((z[:, m] / s[m] + S * others) / (1 / s[m] + S))
        simulated["exact"].append((z[:, m] / s[m] + exact * others) / (1 / s[m] + exact))
    for name, estimates in simulated.items():
        for m, estimate in enumerate(estimates):
            squared = (estimate - theta[:, m]).square()
            squared = squared if d is None else squared.sum(-1)
            standard_error = float(squared.std()) / repeats**0.5
            assert abs(float(squared.mean()) - getattr(report.rows[m], name)) < 4.5 * standard_error


def test_self_fl_harms_where_clients_differ_more_than_s_plus_one_over_S():
    n = torch.tensor([5, 20, 80, 320, 1280])
    report = gain_from_arrays(torch.zeros(5), torch.ones(5), n, s0=0.1, margin=0.0)
    model = TwoLevel(torch.zeros(5), 1 / n, 0.1)
    hurt = [row.client for row, limit in zip(report.rows, model.s + 1 / model.S, strict=True) if limit < 0.1]
    assert list(report.harmed_by_paper) == hurt
    assert 0 < len(hurt) < 5
    assert report.gaining == ("0", "1", "2", "3", "4")  # the exact posterior helps everybody
    assert (column(report, "paper_claim") < column(report, "alone")).all()  # which the paper claims for itself


def test_margin_decides_what_counts_as_a_change():
    arguments = ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [4, 40, 4000])
    careful, lax = (gain_from_arrays(*arguments, s0=0.5, margin=margin) for margin in (0.001, 0.3))
    saved = column(careful, "saved").tolist()
    assert [row.with_exact for row in careful.rows] == ["better" if x > 0.001 else "same" for x in saved]
    assert [row.with_exact for row in lax.rows] == ["better" if x > 0.3 else "same" for x in saved]
    assert careful.gaining == ("0", "1")
    assert lax.gaining == ()


def test_limits_of_s0():
    arguments = ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [4, 5, 6])
    same = gain_from_arrays(*arguments, s0=0.0)
    least = 1 / (4 / 1 + 5 / 2 + 6 / 3)
    for name in ("one_for_all", "paper", "paper_claim", "exact"):
        torch.testing.assert_close(column(same, name), torch.full((3,), least, dtype=F64), rtol=1e-12, atol=0)
    apart = gain_from_arrays(*arguments, s0=math.inf)
    assert torch.equal(column(apart, "paper"), column(apart, "alone"))
    assert torch.equal(column(apart, "exact"), column(apart, "alone"))
    assert apart.gaining == apart.harmed_by_paper == ()


# ---------------------------------------------------------------- estimating s0


def test_spread_by_hand():
    # equal s: Q(s0) = Σ (z − z̄)² / (s0 + s) = M − 1  ->  s0 = sample variance − s = 7 − 2
    z = torch.tensor([1.0, 2.0, 6.0], dtype=F64)
    assert estimate_spread(z, torch.full((3,), 2.0, dtype=F64)).s0 == pytest.approx(5, rel=1e-12)
    assert estimate_spread(z, torch.full((3,), 8.0, dtype=F64)).s0 == 0  # truncated
    # the range: 14/(s0 + 2) at the 97.5% and 2.5% points of χ²(2), −2 ln 0.025 and −2 ln 0.975
    spread = estimate_spread(z, torch.full((3,), 2.0, dtype=F64))
    assert spread.low == pytest.approx(max(0, 14 / (-2 * math.log(0.025)) - 2), abs=1e-12)
    assert spread.high == pytest.approx(14 / (-2 * math.log(0.975)) - 2, rel=1e-10)
    # three coordinates, of which only one differs: |z − z̄|² is the same, as are the traces
    vectors = torch.stack([z, 0 * z + 4, 0 * z], -1)
    spread = estimate_spread(vectors, torch.full((3,), 2.0, dtype=F64))
    assert spread.s0 == pytest.approx(5, rel=1e-12)
    assert spread.low is None


def test_spread_is_of_estimates_and_not_of_examples():
    report = gain_from_arrays([1.0, 2.0, 6.0], [2.0, 20.0, 8.0], [1, 10, 4])  # s = 2, as by hand above
    assert report.spread.s0 == pytest.approx(5, rel=1e-12)
    assert column(report, "alone").tolist() == [2.0, 2.0, 2.0]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.integers(0, 10**6), st.floats(-4, 4), st.sampled_from([None, 1, 3]))
def test_spread_solves_its_equation(M, seed, exponent, d):
    g = torch.Generator().manual_seed(seed)
    z = 10**exponent * torch.randn(M, *([] if d is None else [d]), generator=g, dtype=F64)
    s = torch.rand(M, generator=g, dtype=F64) + 0.01

    def q(s0: float) -> float:
        w = 1 / (s0 + s)
        rows = z.reshape(M, -1)
        return float((w * (rows - (w[:, None] * rows).sum(0) / w.sum()).square().sum(-1)).sum())

    spread = estimate_spread(z, s)
    if spread.s0 > 0:
        assert q(spread.s0) == pytest.approx(M - 1, rel=1e-8)
    else:
        assert q(0.0) <= M - 1
    if spread.low is not None and spread.high is not None:
        assert 0 <= spread.low <= spread.high
        assert spread.low <= spread.s0 <= max(spread.high, spread.s0)


def test_spread_is_centred_on_the_truth_and_its_range_covers_it():
    g = torch.Generator().manual_seed(2)
    n = torch.tensor([4, 5, 8, 10, 16, 20, 40, 80, 100, 400, 800, 1000], dtype=F64)
    s0, s, repeats = 0.05, 0.2 / n, 400
    spreads = [
        estimate_spread((s0 + s).sqrt() * torch.randn(12, generator=g, dtype=F64) + 7, s) for _ in range(repeats)
    ]
    found = torch.tensor([spread.s0 for spread in spreads])
    assert abs(float(found.mean()) - s0) < 3.5 * float(found.std()) / repeats**0.5
    covered = sum(spread.low <= s0 <= spread.high for spread in spreads)
    assert abs(covered / repeats - 0.95) < 3.5 * math.sqrt(0.95 * 0.05 / repeats)


def test_identical_estimates_have_no_spread():
    report = gain_from_arrays([1.0, 1.0], [0.1, 0.2], [10, 10])
    assert report.spread.s0 == 0
    assert (report.spread.low, report.spread.high) == (0, 0)
    assert not report.spread.known


# ---------------------------------------------------------------- tables


CSV = "client,estimate,variance,n,note\n007,1.5,0.1,10,x\nb,2.5,0.2,20,y\nc [red],1.0,0.4,30,z\n"


def test_csv_and_parquet_and_arrays_agree(tmp_path):
    (tmp_path / "t.csv").write_text(CSV)
    table = pa.table(
        {
            "n": pa.array([10, 20, 30], pa.int32()),
            "client": ["007", "b", "c [red]"],
            "estimate": [1.5, 2.5, 1.0],
            "variance": [0.1, 0.2, 0.4],
        }
    )
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    direct = gain_from_arrays([1.5, 2.5, 1.0], [0.1, 0.2, 0.4], [10, 20, 30], clients=["007", "b", "c [red]"])
    assert gain_from_table(tmp_path / "t.csv") == direct
    assert gain_from_table(str(tmp_path / "t.parquet")) == direct
    assert gain_from_table(tmp_path / "t.csv", s0=0.3, margin=0.1) != direct
    assert direct.rows[2].n == 30


def test_names_that_look_like_numbers_stay_names(tmp_path):
    (tmp_path / "t.csv").write_text("client,estimate,variance,n\n007,1,1,1\n7,2,1,1\n")
    assert [row.client for row in gain_from_table(tmp_path / "t.csv").rows] == ["007", "7"]


def test_vectors_are_read_in_the_order_of_their_numbers(tmp_path):
    d = 11  # estimate_10 sorts before estimate_2 as text
    z = torch.randn(3, d, generator=torch.Generator().manual_seed(0), dtype=F64)
    columns = {f"estimate_{j}": z[:, j].tolist() for j in reversed(range(d))}
    table = pa.table(
        {"client": [1, 2, 3], "variance": [1.0, 2.0, 3.0], "n": [1.0, 2.0, 3.0], **columns, "11": ["x"] * 3}
    )
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    report = gain_from_table(tmp_path / "t.parquet")
    assert report == gain_from_arrays(z, [1.0, 2.0, 3.0], [1, 2, 3], clients=["1", "2", "3"])
    assert report.spread.low is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,estimate,var,n\na,1,1,1\nb,1,1,1\n", "one column variance, it has none; .* client, estimate, var, n"),
        ("name,estimate,variance,n\na,1,1,1\nb,1,1,1\n", "one column client, it has none"),
        ("client,variance,n\na,1,1\nb,1,1\n", "one column estimate, it has none"),
        ("client,estimate,variance,n,n\na,1,1,1,1\nb,1,1,1,1\n", "one column n, it has 2"),
        ("client,estimate,estimate_0,variance,n\na,1,1,1,1\n", "both estimate and estimate_0"),
        (
            "client,estimate_0,estimate_2,variance,n\na,1,1,1,1\n",
            "estimate_0 to estimate_1; it has estimate_0, estimate_2",
        ),
        ("client,estimate,variance,n\na,1,1,1\n", "at least two clients; got 1"),
        ("client,estimate,variance,n\n", "at least two clients; got 0"),
        ("client,estimate,variance,n\na,1,1,1\na,2,1,1\n", "more than one for client a"),
        ("client,estimate,variance,n\na,1,1,1\n,2,1,1\n", "row 2 has no client name"),
        ("client,estimate,variance,n\na,1,1,1\nb,,1,1\n", "column estimate is empty for client b"),
        ("client,estimate,variance,n\na,1,1,1\nb,nan,1,1\n", "column estimate is empty for client b"),
        ("client,estimate,variance,n\na,1,,1\nb,1,,1\n", "column variance is empty for client a, b"),
        (
            "client,estimate,variance,n\na,1,1,1\nb,inf,1,1\n",
            "estimate must be a finite number; it is not for client b",
        ),
        ("client,estimate,variance,n\na,1,1,1\nb,two,1,1\n", "column estimate must hold numbers; it holds string"),
        ("client,estimate,variance,n\na,1,1,1\nb,1,0,1\n", "finite and above 0; it is not for client b"),
        ("client,estimate,variance,n\na,1,1,1\nb,1,-2,1\n", "finite and above 0; it is not for client b"),
        ("client,estimate,variance,n\na,1,1,0\nb,1,1,1\n", "1 or more; it is not for client a"),
        ("client,estimate,variance,n\na,1,1,1\nb,1,1,2.5\n", "whole number of examples"),
        ("client,estimate,variance,n\n" + "".join(f"{i},1,0,1\n" for i in range(9)), "client 0, 1, 2 and 6 more"),
        ("client,estimate\na\n", "cannot read"),
        ("", "cannot read"),
    ],
)
def test_bad_tables_are_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        gain_from_table(tmp_path / "t.csv")


def test_nan_in_parquet_is_refused(tmp_path):
    table = pa.table({"client": ["a", "b"], "estimate": [1.0, math.nan], "variance": [1.0, 1.0], "n": [1, 1]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="finite number; it is not for client b"):
        gain_from_table(tmp_path / "t.parquet")


def test_bad_files_are_refused_with_the_reason(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*absent\.csv"):
        gain_from_table(tmp_path / "absent.csv")
    with pytest.raises(DataError, match=r"wanted a \.csv or \.parquet"):
        gain_from_table(tmp_path / "t.xlsx")
    (tmp_path / "t.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot read"):
        gain_from_table(tmp_path / "t.parquet")


def test_bad_arguments_are_refused_with_the_reason():
    good = ([1.0, 2.0], [1.0, 1.0], [1, 1])
    for s0 in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="s0, the variance between clients, must be 0 or more"):
            gain_from_arrays(*good, s0=s0)
    with pytest.raises(ConfigError, match="0 <= margin < 1; got 1"):
        gain_from_arrays(*good, margin=1.0)
    with pytest.raises(DataError, match=r"got 2 clients, estimates \[3\]"):
        gain_from_arrays([1.0, 2.0, 3.0], [1.0, 1.0], [1, 1])
    with pytest.raises(DataError, match=r"got 1 clients, estimates \[\]"):
        gain_from_arrays(1.0, 0.1, 3)
    with pytest.raises(DataError, match="got 3 clients"):
        gain_from_arrays(*good, clients=["a", "b", "c"])
    with pytest.raises(DataError, match="finite number; it is not for client 1"):
        gain_from_arrays([[1.0, 2.0], [1.0, math.nan]], [1.0, 1.0], [1, 1])


# ---------------------------------------------------------------- what people see


def test_table_shows_each_verdict_and_names_as_they_are():
    # s0 = 1 against s + 1/S = 1.27 (poor), 0.40 (middle), 0.31 (rich, which ρ = 0.3% can neither help nor harm)
    names = ["poor", "[b]middle", "twin", "triplet", "rich"]
    report = gain_from_arrays([0.0] * 5, [1.0] * 5, [1, 10, 10, 10, 1000], clients=names, s0=1.0)
    changes = {row.client: (row.with_exact, row.with_paper) for row in report.rows}
    assert changes["poor"] == ("better", "better")
    assert changes["[b]middle"] == ("better", "worse")
    assert changes["rich"] == ("same", "same")
    red = [str(cell) for cell in render(report).columns[4].cells if cell.style == "red"]
    assert len(red) == sum(row.with_paper == "worse" for row in report.rows) > 0
    lines = printed(report).splitlines()
    assert next(line for line in lines if "poor" in line).rstrip("│ ").endswith("│ gains")
    assert any("[b]middle" in line and "gains with exact weights only" in line for line in lines)
    assert any("rich" in line and "little to gain" in line for line in lines)


@pytest.mark.parametrize("limit", [2, 5, 6, 19, 20, 50])
def test_long_tables_keep_both_ends(limit):
    n = range(1, 21)
    report = gain_from_arrays([0.0] * 20, [1.0] * 20, list(n), clients=[f"c{i}" for i in n], s0=0.1)
    text = printed(report, limit=limit)
    assert sum(text.count(f" c{i} ") for i in n) == min(limit, 20)
    assert 0 < text.index(" c1 ") < text.index(" c20 ")  # c1 saves most, c20 least
    assert (f"... {20 - limit} more" in text) == (limit < 20)


def test_forty_clients_are_shown():
    assert "... 1 more" in printed(gain_from_arrays([0.0] * 41, [1.0] * 41, list(range(1, 42)), s0=0.1))


def test_summary_says_who_gains_and_who_is_harmed():
    known = gain_from_arrays([0.0] * 5, [1.0] * 5, [1, 10, 10, 10, 1000], s0=1.0)
    total = sum(row.exact for row in known.rows) / sum(row.alone for row in known.rows)
    assert summary(known) == (
        f"4 of 5 clients gain 5% or more by federating; over all, expected squared error falls by {1 - total:.0%}; "
        "Self-FL's published weights would make 3 of 5 worse off than alone. Variance between clients s0 = 1 (given)."
    )
    assert summary(gain_from_arrays([0.0, 1.0], [1.0, 1.0], [1, 1], s0=math.inf)) == (
        "No client gains 5% or more by federating; over all, expected squared error falls by 0%. "
        "Variance between clients s0 = inf (given)."
    )
    estimated = summary(gain_from_arrays([1.0, 2.0, 6.0], [2.0, 2.0, 2.0], [1, 1, 1]))
    assert estimated.endswith("s0 = 5 (estimated, 95% range 0 to 274).")
    assert summary(gain_from_arrays(torch.zeros(2, 2), [1.0, 1.0], [1, 1])).endswith("s0 = 0 (estimated).")


def test_the_control_of_self_fl_estimates_no_s0(tmp_path):
    run(
        federation=tiny_federation(), model=tiny_model, algorithms="selffl_control,selffl", rounds=4, seeds=[0], lr=0.1,
        batch=5, steps=5, out=tmp_path / "run",
    )  # fmt: skip
    assert gain_from_run(tmp_path / "run").rows == gain_from_run(tmp_path / "run", "selffl").rows
    for wanted in ("selffl_control", "ditto"):
        with pytest.raises(ConfigError, match=f"of {wanted} with client variances; run selffl first"):
            gain_from_run(tmp_path / "run", wanted)
    assert gain_from_run(tmp_path / "run", "selffl_control", s0=1.0).rows
    run(
        federation=tiny_federation(), model=tiny_model, algorithms="selffl", rounds=1, seeds=[0], participation=0.1,
        batch=5, steps=5, out=tmp_path / "short",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="trained often enough to have a variance, and two are needed"):
        gain_from_run(tmp_path / "short")
