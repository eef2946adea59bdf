import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinfed.theory.two_level import TwoLevel, others_sum

F64 = torch.float64


def close(a: Tensor, b: Tensor | float | list, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=F64).expand_as(a), rtol=tol, atol=tol)


def draw(M: int, s0: float, low: int, high: int, *, batch: tuple[int, ...] = (), seed: int = 0):
    """The paper's synthetic task, θ_0 = 1.6, N_m uniform in [low, high], s_m = 0.1/N_m: the model and θ_m."""
    g = torch.Generator().manual_seed(seed)
    s = 0.1 / torch.randint(low, high + 1, (*batch, M), generator=g).to(F64)
    theta = 1.6 + math.sqrt(s0) * torch.randn(*batch, M, generator=g, dtype=F64)
    return TwoLevel(theta + s.sqrt() * torch.randn(*batch, M, generator=g, dtype=F64), s, s0), theta


# ---------------------------------------------------------------- worked by hand


def test_three_clients_by_hand():
    # s0 = 1, s = 1, 1, 3  ->  w = 1/2, 1/2, 1/4;  W = 5/4;  S = 3/4, 3/4, 1
    m = TwoLevel(z=[0.0, 4.0, 8.0], s=[1.0, 1.0, 3.0], s0=1.0)
    close(m.w, [1 / 2, 1 / 2, 1 / 4])
    close(m.S, [3 / 4, 3 / 4, 1])
    close(m.theta_G, (0 + 2 + 2) / (5 / 4))
    close(m.v_G, 4 / 5)
    close(m.init, [(2 + 2) / (3 / 4), (0 + 2) / (3 / 4), 0 + 2])
    close(m.rho, [3 / 7, 3 / 7, 3 / 4])  # (3/4)/(1 + 3/4), and 1/(1/3 + 1)
    close(m.theta_FL, [16 / 7, 4 * 4 / 7 + 3 / 7 * 8 / 3, 8 / 4 + 2 * 3 / 4])
    close(m.v_FL, [4 / 7, 4 / 7, 3 / 4])
    close(m.gain, [7 / 4, 7 / 4, 4])
    # client 1 is really off by (4/7)² s + (3/7)² (s0 + 1/S) = 16/49 + 9/49 · 7/3
    close(m.mse[0], 37 / 49)
    close(m.steps(eta=0.5)[0], math.log(3 / 7) / math.log(1 / 2))
    # exact: the others know θ_1 to 1 + 4/3 = 7/3, so ρ = (3/7)/(1 + 3/7) = 3/10
    close(m.exact.rho[0], 3 / 10)
    close(m.exact.theta_FL[0], 3 / 10 * 16 / 3)
    close(m.exact.v_FL[0], 7 / 10)
    close(m.exact.mse[0], 7 / 10)


def test_two_clients_fixed_point_by_hand():
    # s0 = 0, s = 1: w = S = 1, ρ = 1/2.  x = (z_1 + y)/2 and y = (z_2 + x)/2  ->  x = (2 z_1 + z_2)/3
    m = TwoLevel(z=[0.0, 3.0], s=[1.0, 1.0], s0=0.0)
    close(m.fixed_point().personal, [1.0, 2.0])
    close(m.fixed_point().server, 1.5)
    close(m.theta_FL, 1.5)  # so the iteration ends beside θ^FL


# ---------------------------------------------------------------- against dense linear algebra


def posterior_mean_and_variance(z: Tensor, s: Tensor, s0: float, m: int, *, own_is_root: bool) -> tuple[float, float]:
    """Of θ_m, from the joint precision matrix of (θ_0, θ_1..θ_M); own_is_root sets θ_m = θ_0, as (3) does."""
    M = len(z)
    precision, shift = torch.zeros(M + 1, M + 1, dtype=F64), torch.zeros(M + 1, dtype=F64)
    for k in range(M):
        own = 0 if own_is_root and k == m else k + 1
        precision[own, own] += 1 / s[k]
        shift[own] += z[k] / s[k]
        if own:
            precision[0, 0] += 1 / s0
            precision[own, own] += 1 / s0
            precision[0, own] -= 1 / s0
            precision[own, 0] -= 1 / s0
    target = 0 if own_is_root else m + 1
    kept = [i for i in range(M + 1) if precision[i, i] > 0]
    covariance = torch.linalg.inv(precision[kept][:, kept])
    i = kept.index(target)
    return float((covariance @ shift[kept])[i]), float(covariance[i, i])


@pytest.mark.parametrize("posterior", ["paper", "exact"])
@pytest.mark.parametrize("s0", [0.003, 0.4, 7.0])
def test_posteriors_follow_from_the_joint_gaussian(posterior, s0):
    model, _ = draw(5, s0, 10, 200)
    model = TwoLevel(model.z, model.s, s0, posterior)
    for m in range(5):
        mean, variance = posterior_mean_and_variance(model.z, model.s, s0, m, own_is_root=posterior == "paper")
        close(model.theta_FL[m], mean, 1e-10)
        close(model.v_FL[m], variance, 1e-10)


def dense_fixed_point(m: TwoLevel, rho: Tensor) -> Tensor:
    mean_of_others = m.w.expand(m.clients, -1).clone().fill_diagonal_(0)
    mean_of_others /= mean_of_others.sum(1, keepdim=True)
    return torch.linalg.solve(torch.eye(m.clients, dtype=F64) - rho[:, None] * mean_of_others, (1 - rho) * m.z)


@pytest.mark.parametrize("s0", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("M", [2, 3, 20])
def test_fixed_point_solves_the_linear_system(M, s0):
    model, _ = draw(M, s0, 10, 200)
    for m in (model, model.exact):
        whole = m.rounded_shrink(1e-4)
        for shrink, rho in ((None, m.rho), (whole, whole)):
            x = m.fixed_point(shrink)
            close(x.personal, dense_fixed_point(m, rho), 1e-11)
            close(x.server, (m.w * x.personal).sum() / m.w.sum())
            close(x.personal, (1 - rho) * m.z + rho * m.mean_of_others(x.personal))


# ---------------------------------------------------------------- identities of Sections 2 and 3


@pytest.mark.parametrize("s0", [0.0, 0.001, 1.0, 50.0])
def test_identities(s0):
    m, _ = draw(20, s0, 10, 200, batch=(3,))
    W = m.w.sum(-1, keepdim=True)
    theta_G = m.theta_G[..., None]
    close(m.w, 1 / (s0 + m.s))
    close(m.S, W - m.w)
    close(m.p, m.w / W)
    close(m.theta_G, (m.w * m.z).sum(-1) / W[..., 0])
    close(m.v_G, 1 / W[..., 0])
    close(m.init, theta_G - m.w / m.S * (m.z - theta_G))  # (12)
    close(m.init, ((m.w * m.z).sum(-1, keepdim=True) - m.w * m.z) / m.S)  # (7)
    close(m.theta_FL, (m.z / m.s + m.S * m.init) / (1 / m.s + m.S))  # (3)
    close(m.theta_FL, (1 - m.rho) * m.z + m.rho * m.init)
    close(m.v_FL, 1 / (1 / m.s + m.S))
    close(m.gain, m.s / m.v_FL)
    close(m.rho, m.S / (1 / m.s + m.S))
    close(m.rho + m.own_weight, 1.0)
    others_variance = s0 + 1 / m.S
    close(m.exact.rho, (1 / others_variance) / (1 / m.s + 1 / others_variance))
    close(m.exact.mse, m.exact.v_FL)
    assert (m.gain >= 1).all()


def test_early_stopped_descent_from_init_reaches_theta_fl():
    m, _ = draw(6, 0.01, 10, 20)
    eta = 1e-4
    for model in (m, m.exact):
        close((1 - eta / m.s) ** model.steps(eta), model.rho)  # (8)
        close(model.descend(model.init, eta, model.steps(eta)), model.theta_FL)
    x = m.init
    for _ in range(7):
        x = x - eta * (x - m.z) / m.s  # (5)
    close(m.descend(m.init, eta, 7), x)


def test_rounding_the_steps_changes_rho_by_at_most_one_step():
    m, _ = draw(20, 0.001, 10, 200)
    for eta in (1e-6, 1e-4, 4e-4):
        one_step = 1 - eta / m.s
        rounded = m.rounded_shrink(eta)
        assert ((rounded >= m.rho * one_step * (1 - 1e-12)) & (rounded <= m.rho / one_step * (1 + 1e-12))).all()


# ---------------------------------------------------------------- extreme cases (Remarks 2.1 and 2.3)


def test_unrelated_clients_learn_alone():
    z, s = [1.0, 2.0, 6.0], [0.1, 0.2, 0.3]
    far = TwoLevel(z, s, 1e14)
    for m in (far, far.exact):
        close(m.theta_FL, z)
        close(m.gain, 1.0)
        close(m.theta_G, 3.0)  # a plain average
    for m in (TwoLevel(z, s, math.inf), TwoLevel(z, s, math.inf, "exact")):
        assert m.theta_FL.tolist() == z
        assert m.gain.tolist() == [1.0] * 3
        assert m.mse.tolist() == m.s.tolist()
        assert m.rho.tolist() == [0.0] * 3
        assert m.fixed_point().personal.tolist() == z
        close(m.theta_G, 3.0)
        close(m.init, [4.0, 3.5, 1.5])
        assert m.v_G == math.inf
        assert (m.mse_global == math.inf).all()
        assert (m.steps(0.01) == math.inf).all()
        assert (m.rounded_shrink(0.01) == 0).all()


def test_identical_clients_share_the_global_model():
    z, s = torch.tensor([1.0, 2.0, 6.0], dtype=F64), torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    m = TwoLevel(z, s, 0)
    close(m.theta_G, (z / s).sum() / (1 / s).sum())  # weights are the precisions
    for model in (m, m.exact):
        close(model.theta_FL, m.theta_G)
        close(model.mse, m.v_G)
        close(model.mse_global, m.v_G)


def test_a_client_with_far_better_data_learns_alone_and_helps_the_others():
    s1 = 1e-9
    for s0 in (0.0, 0.5):
        m = TwoLevel([3.0, 1.0, 2.0, 4.0], [s1, 1.0, 2.0, 3.0], s0)
        close(m.theta_FL[0], 3.0, 1e-7)
        close(m.gain[0], 1.0, 1e-7)
        # The remark prints GAIN_2 >= s_2/s_1; that is its s0 = 0 case.
        assert m.gain[1] >= 1 + 1.0 / (s0 + s1)
    assert TwoLevel([0.0, 0.0], [s1, 1.0], 0.0).gain[1] >= 1.0 / s1


def test_large_samples_few_clients_keep_little_of_the_others():
    M, N, v2, s0 = 20, 10**7, 0.7, 1.3
    m = TwoLevel([0.0] * M, [v2 / N] * M, s0)
    close(m.rho / ((M - 1) / N * v2 / s0), 1.0, 1e-5)


def test_small_samples_many_clients_need_the_same_distance_everywhere():
    M, N, s0 = 200_000, 1000, 1.0
    one = torch.ones(M, dtype=F64)
    m = TwoLevel(0 * one, one / N, s0)
    close((1 - m.rho) / (N / M * s0), 1.0, 0.01)  # (11), up to 1/N and N/M
    eta = 1e-5
    close(eta * m.steps(eta) / (s0 / M), 1.0, 0.01)


def test_homogeneous_clients_need_the_same_distance_everywhere():
    n = torch.arange(50, 2050, dtype=F64)
    m = TwoLevel(0 * n, 0.3 / n, 0)
    close(m.rho, (n.sum() - n) / n.sum())
    eta = 1e-8
    close(eta * m.steps(eta) / (0.3 / n.sum()), 1.0, 2e-3)


def test_a_single_client_has_nobody_to_learn_from():
    for m in (
        TwoLevel([2.0], [0.3], 0.1),
        TwoLevel([2.0], [0.3], 0.0, "exact"),
        TwoLevel([2.0], [0.3], math.inf),
    ):
        assert m.theta_FL.tolist() == m.init.tolist() == [2.0]
        assert m.theta_G == 2.0
        assert m.gain.tolist() == [1.0]
        assert m.rho.tolist() == m.S.tolist() == [0.0]
        assert m.mse.tolist() == m.mse_global.tolist() == m.s.tolist()
        assert m.steps(0.1).tolist() == [math.inf]
        assert m.fixed_point().personal.tolist() == [2.0]
        states = list(itertools.islice(m.rounds(0.0), 3))
        assert [float(r.server) for r in states] == [0.0, 2.0, 2.0]


# ---------------------------------------------------------------- numerics


def test_a_dominating_client_does_not_cancel_the_others():
    # Σ w − w_1 would be 1e18 + 2 − 1e18 = 0 in float64
    m = TwoLevel([5.0, 1.0, 3.0], [1e-18, 1.0, 1.0], 0.0)
    close(m.S[0], 2.0)
    close(m.init[0], 2.0)
    close(m.rho[0] / 2e-18, 1.0)
    close(m.fixed_point().personal[0], 5.0)


def test_steps_survive_rho_rounding_to_one():
    eta, s = 1e-9, torch.full((50,), 1e12, dtype=F64)
    m = TwoLevel(torch.zeros(50), torch.cat([s[:1], 1e-6 + 0 * s[1:]]), 0.0)
    assert m.rho[0] == 1
    close(m.steps(eta)[0] * eta * m.S[0], 1.0)


def test_huge_variances_do_not_overflow():
    m = TwoLevel([1.0, 2.0], [1e308, 1e308], 1e308)
    close(m.theta_G, 1.5)
    close(m.init, [2.0, 1.0])


def test_others_sum_is_the_sum_without_oneself():
    x = torch.arange(24, dtype=F64).reshape(2, 4, 3)
    for dim in (0, 1, -1):
        close(others_sum(x, dim), x.sum(dim, keepdim=True) - x)


# ---------------------------------------------------------------- number of steps


def test_steps_increase_with_own_variance_and_saturate():
    # The other client has w = 1/(s0 + s_2) = 50, so S_{-1} = 50 whatever s_1 is; eta = 1e-3.
    eta, s0 = 1e-3, 0.005
    own = torch.tensor([2e-3, 1e-2, 0.1, 1.0, 1e6], dtype=F64)
    s = torch.stack([own, torch.full_like(own, 0.015)], -1)
    m = TwoLevel(torch.zeros_like(s), s, s0)
    close(m.S[:, 0], 50.0)
    steps = m.steps(eta)[:, 0]
    assert [round(x, 1) for x in steps[:3].tolist()] == [3.5, 10.4, 18.1]
    assert (steps.diff() > 0).all()
    assert (steps < 1 / (eta * 50)).all()
    close(steps[-1], 20.0, 1e-5)


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6),
    st.floats(0, 10),
    st.sampled_from(["paper", "exact"]),
)
def test_noisier_clients_take_more_steps(s, s0, posterior):
    eta = min(s) / 3
    quiet = TwoLevel([0.0] * len(s), s, s0, posterior)
    noisy = TwoLevel([0.0] * len(s), [s[0] * 2, *s[1:]], s0, posterior)
    assert quiet.steps(eta)[0] < noisy.steps(eta)[0] <= 1 / (eta * noisy.Q[0]) * (1 + 1e-9)


# ---------------------------------------------------------------- expected errors


@pytest.mark.parametrize(
    ("s0", "alone", "paper", "exact", "global_"),
    [  # found by an independent simulation of M = 20, N in [10, 200], per-example variance 0.1, 2000 repeats
        (0.0, 0.001601, 0.000046, 0.000046, 0.000046),
        (1e-3, 0.001601, 0.000894, 0.000558, 0.000992),
        (1e-2, 0.001601, 0.004598, 0.001266, 0.009434),
        (1.0, 0.001601, 0.003034, 0.001597, 0.936290),
    ],
)
def test_expected_errors_agree_with_simulation(s0, alone, paper, exact, global_):
    m, theta = draw(20, s0, 10, 200, batch=(20_000,), seed=1)
    everyone = m.theta_G[..., None].expand_as(theta)
    for estimate, expected, known in (
        (m.z, m.s, alone),
        (m.theta_FL, m.mse, paper),
        (m.exact.theta_FL, m.exact.mse, exact),
        (everyone, m.mse_global, global_),
    ):
        squared = (estimate - theta).square().mean(-1)  # errors within a repeat are dependent
        error = float(squared.std() / len(squared) ** 0.5)
        assert abs(float(squared.mean() - expected.mean())) < 4 * error
        assert float(expected.mean()) == pytest.approx(known, rel=0.05)


def test_paper_posterior_claims_less_error_than_it_makes():
    m, _ = draw(20, 0.01, 10, 200)
    assert (m.v_FL < m.s).all()  # the claim
    assert (m.mse > m.s).sum() > 15  # the truth, for most clients


variances = st.floats(-6, 6).map(lambda e: 10.0**e)


@settings(deadline=None)
@given(st.lists(variances, min_size=2, max_size=7), variances)
def test_paper_posterior_hurts_exactly_when_clients_differ_more_than_s_plus_one_over_S(s, s0):
    m = TwoLevel([0.0] * len(s), s, s0)
    threshold = m.s + 1 / m.S
    clear = (s0 / threshold - 1).abs() > 1e-6
    # m.mse − m.s divided by ρ m.s, which keeps the sign where the difference itself is lost in rounding
    change = m.rho * (m.s + s0 + 1 / m.S) / m.s - 2
    assert torch.equal((change > 0)[clear], (s0 > threshold)[clear])
    distinct = (m.mse - m.s).abs() > 1e-9 * m.s
    assert torch.equal((m.mse > m.s)[distinct], (change > 0)[distinct])


@settings(deadline=None)
@given(st.lists(variances, min_size=1, max_size=7), variances, st.floats(0, 1))
def test_no_weight_beats_the_exact_posterior(s, s0, weight):
    m = TwoLevel([0.0] * len(s), s, s0, "exact")
    other = m.mse_of(torch.full_like(m.s, weight))
    assert (m.mse <= other * (1 + 1e-12)).all()
    assert (m.mse <= m.s).all()
    assert (m.mse <= m.mse_global * (1 + 1e-12)).all()


def test_traces_of_any_covariance_give_the_expected_squared_length():
    """Coordinates with very different variances: only their sums enter, and the error is still exact."""
    g = torch.Generator().manual_seed(0)
    repeats, M, d = 40_000, 4, 3
    own = torch.rand(M, d, generator=g, dtype=F64) ** 3
    between = torch.tensor([2.0, 0.1, 0.0], dtype=F64)
    theta = between.sqrt() * torch.randn(repeats, M, d, generator=g, dtype=F64)
    z = theta + own.sqrt() * torch.randn(repeats, M, d, generator=g, dtype=F64)
    m = TwoLevel(z, own.sum(-1).expand(repeats, M), between.sum())
    for model in (m, m.exact):
        squared = (model.theta_FL - theta).square().sum(-1)
        standard_error = squared.std(0) / repeats**0.5
        assert ((squared.mean(0) - model.mse[0]).abs() < 4 * standard_error).all()


# ---------------------------------------------------------------- the generic iteration


def literal_rounds(m: TwoLevel, start: float, count: int, eta: float | None):
    """Equations (13), (5) or (30), (14), one client at a time."""
    M = m.clients
    server, personal = start, [start] * M
    for _ in range(count):
        arrived = []
        for k in range(M):
            w, S = float(m.w[k]), float(m.S[k])
            x = server - w / S * (personal[k] - server)
            if eta is None:
                x = float(1 - m.rho[k]) * float(m.z[k]) + float(m.rho[k]) * x
            else:
                for _ in range(max(1, round(float(m.steps(eta)[k])))):
                    x = x - eta * (x - float(m.z[k])) / float(m.s[k])
            arrived.append(x)
        personal = arrived
        server = sum(float(m.w[k]) * personal[k] for k in range(M)) / float(m.w.sum())
    return server, personal


@pytest.mark.parametrize("eta", [None, 1e-3])
@pytest.mark.parametrize("s0", [0.0, 0.001, 1.0])
def test_rounds_follow_the_equations_literally(s0, eta):
    model, _ = draw(4, s0, 10, 20)
    for m in (model, model.exact):
        shrink = None if eta is None else m.rounded_shrink(eta)
        for count in (0, 1, 2, 9):
            state = next(itertools.islice(m.rounds(0.5, shrink), count, None))
            server, personal = literal_rounds(m, 0.5, count, eta)
            close(state.server, server)
            close(state.personal, personal)


@pytest.mark.parametrize("M", [10, 20, 100, 500, 2000])
def test_iteration_stays_below_proposition_3_1(M):
    model, _ = draw(M, 0.001, 10, 20, seed=M)
    for m, shrink in ((model, None), (model.exact, None), (model, model.rounded_shrink(1e-4))):
        for t, state in zip(range(200), m.rounds(0.0, shrink), strict=False):
            if t % 7 > 1:
                continue
            bound = m.bound(t, 0.0, shrink)
            assert (state.server - m.theta_G).abs() <= bound.server * (1 + 1e-12)
            assert (state.personal - m.theta_FL).abs().max() <= bound.personal * (1 + 1e-12)


def test_statistical_error_shrinks_like_one_over_root_of_clients():
    scaled, largest_rho = [], []
    for M in (10, 20, 100, 500, 2000):
        m, _ = draw(M, 0.001, 10, 20, batch=(20,), seed=M)
        gap = (m.fixed_point().personal - m.theta_FL).abs().amax(-1)
        close(m.bound(10**9, 0.0).personal, gap)
        scaled.append(float(gap.mean()) * M**0.5)
        largest_rho.append(float(m.rho.amax(-1).mean()))
    assert 0.02 < min(scaled) <= max(scaled) < 0.065
    # ... while q -> 1: rounds needed grow in proportion to M
    assert largest_rho[1:3] + largest_rho[4:] == pytest.approx([0.965, 0.9926, 0.9996], abs=0.005)


def test_bound_is_reached_in_the_end_and_not_vacuous_at_the_start():
    m, _ = draw(20, 0.001, 10, 20)
    last = next(itertools.islice(m.rounds(0.0), 1500, None))
    end, begin = m.bound(1500, 0.0), m.bound(0, 0.0)
    close((last.personal - m.theta_FL).abs().max(), end.personal)
    close((last.server - m.theta_G).abs(), end.server)
    close(last.personal, m.fixed_point().personal)
    assert begin.personal < 1.1 * m.theta_FL.abs().max()


def test_two_runs_approach_each_other_by_q_per_round():
    m, _ = draw(8, 0.01, 10, 200)
    q, distance = m.rho.max(), None
    for a, b in itertools.islice(zip(m.rounds(-4.0), m.rounds(9.0), strict=True), 30):
        now = (a.personal - b.personal).abs().max()
        assert distance is None or now <= q * distance * (1 + 1e-12)
        distance = now


# ---------------------------------------------------------------- any size, any batch, vectors


@st.composite
def models(draw_, max_clients=6):
    batch = draw_(st.sampled_from([(), (1,), (3,), (2, 2)]))
    M = draw_(st.integers(1, max_clients))
    d = draw_(st.sampled_from([None, 1, 3]))
    g = torch.Generator().manual_seed(draw_(st.integers(0, 10**6)))
    s = 10 ** (4 * torch.rand(*batch, M, generator=g, dtype=F64) - 3)
    z = torch.randn(*batch, M, *([] if d is None else [d]), generator=g, dtype=F64)
    s0 = draw_(st.sampled_from([0.0, 1e-6, 0.02, 1.0, 1e5, math.inf]))
    return TwoLevel(z, s, s0, draw_(st.sampled_from(["paper", "exact"])))


def vector(m: TwoLevel, weight: Tensor) -> Tensor:
    return weight[..., None] if m.z.dim() > m.s.dim() else weight


@settings(max_examples=60, deadline=None)
@given(models())
def test_every_quantity_is_finite_shaped_and_ordered(m):
    assert m.theta_FL.shape == m.init.shape == m.z.shape
    assert m.rho.shape == m.gain.shape == m.v_FL.shape == m.mse.shape == m.s.shape
    assert m.v_G.shape == m.s0.shape
    for x in (m.theta_FL, m.init, m.theta_G, m.rho, m.gain, m.mse, m.fixed_point().personal):
        assert x.isfinite().all()
    assert ((m.rho >= 0) & (m.rho <= 1)).all()
    assert (m.exact.rho <= m.rho * (1 + 1e-12)).all()  # the paper over-weights the others, never the reverse
    close(m.p.sum(-1), 1.0)
    close(m.theta_FL, vector(m, 1 - m.rho) * m.z + vector(m, m.rho) * m.init)
    close(m.rho + m.own_weight, 1.0)


@settings(max_examples=40, deadline=None)
@given(models(), st.floats(-5, 5))
def test_bound_holds_for_any_model(m, start):
    axis = -2 if m.z.dim() > m.s.dim() else -1
    norm = (lambda x: x.norm(dim=-1)) if axis == -2 else torch.abs
    for t, state in zip(range(8), m.rounds(start), strict=False):
        bound = m.bound(t, start)
        slack = 1e-9 * (1 + abs(start))
        assert bound.server.shape == bound.personal.shape == m.s0.shape
        assert (norm(state.server - m.theta_G) <= bound.server + slack).all()
        assert (norm(state.personal - m.theta_FL).amax(-1) <= bound.personal + slack).all()


@settings(max_examples=40, deadline=None)
@given(models(max_clients=4))
def test_batches_and_coordinates_do_not_mix(m):
    if m.z.dim() > m.s.dim():
        for j in range(m.z.shape[-1]):
            alone = TwoLevel(m.z[..., j], m.s, m.s0, m.posterior)
            close(m.theta_FL[..., j], alone.theta_FL)
            close(m.fixed_point().personal[..., j], alone.fixed_point().personal)
    for i in itertools.product(*map(range, m.s0.shape)):
        alone = TwoLevel(m.z[i], m.s[i], m.s0[i], m.posterior)
        close(m.theta_FL[i], alone.theta_FL)
        close(m.mse[i], alone.mse)


@settings(max_examples=40, deadline=None)
@given(models(), st.randoms())
def test_names_of_clients_do_not_matter(m, random):
    order = list(range(m.clients))
    random.shuffle(order)
    axis = -2 if m.z.dim() > m.s.dim() else -1
    relabelled = TwoLevel(m.z.index_select(axis, torch.tensor(order)), m.s[..., order], m.s0, m.posterior)
    close(relabelled.theta_FL, m.theta_FL.index_select(axis, torch.tensor(order)))
    close(relabelled.theta_G, m.theta_G)


@settings(max_examples=40, deadline=None)
@given(models(), st.floats(0.01, 100))
def test_a_common_unit_of_variance_changes_no_estimate(m, unit):
    """Why traces may stand for variances per coordinate."""
    scaled = TwoLevel(m.z, m.s * unit, m.s0 * unit, m.posterior)
    close(scaled.theta_FL, m.theta_FL)
    close(scaled.gain / m.gain, 1.0)
    close(scaled.mse / m.mse, unit, 1e-11)


def test_s0_alone_may_be_a_batch():
    s0 = torch.tensor([0.0, 0.5, math.inf], dtype=F64)
    m = TwoLevel([1.0, 2.0], [0.1, 0.3], s0)
    assert m.theta_FL.shape == (3, 2)
    for i in range(3):
        close(m.theta_FL[i], TwoLevel([1.0, 2.0], [0.1, 0.3], float(s0[i])).theta_FL)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1.0, 2.0], [0.1, 0.0], 1.0),
            "every variance s_m must be positive and finite; got values from 0 to 0.1",
        ),
        (([1.0, 2.0], [0.1, -1.0], 1.0), "positive and finite"),
        (([1.0, 2.0], [0.1, math.inf], 1.0), "positive and finite"),
        (([1.0, math.nan], [0.1, 0.1], 1.0), "every estimate z must be finite"),
        (([1.0, 2.0], [0.1, 0.1], -1.0), "s0 must be 0 or more"),
        (([1.0, 2.0], [0.1, 0.1], math.nan), "s0 must be 0 or more"),
        (([1.0, 2.0, 3.0], [0.1, 0.1], 1.0), r"got z \[3\] and s \[2\]"),
        ((torch.zeros(5, 3), torch.ones(3), 1.0), "give s a leading axis of 1"),
        ((torch.zeros(5, 3), torch.ones(2, 3), 1.0), "must broadcast"),
        ((1.0, 0.1, 1.0), "one variance per client"),
        (([], [], 1.0), "one variance per client"),
        (([1.0], [0.1], 1.0, "bayes"), "'bayes'"),
    ],
)
def test_bad_models_are_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        TwoLevel(*arguments)


def test_bad_arguments_are_refused_with_the_reason():
    m = TwoLevel([1.0, 2.0], [0.1, 0.2], 1.0)
    for eta in (0.0, -1.0, 0.1, 5.0, math.nan):
        with pytest.raises(ValueError, match=r"0 < eta < 0\.1, the smallest s_m"):
            m.steps(eta)
    with pytest.raises(ValueError, match="shrink factor"):
        m.fixed_point(torch.tensor([0.5, 1.0]))
