"""The references (kinfed.testing.reference_case): every method as its paper has it, to be read beside that."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax, mse_loss, one_hot

from kinfed.testing.reference_case import ReferenceCase, Stage, descend, near, reference, slopes, total

# ---- alone, one model, and personal models near it ----


@reference("local")
def local(case: ReferenceCase) -> Iterator[Stage]:
    theta = dict.fromkeys(range(3), case.start)
    for active in case.rounds:
        theta |= {m: case.train(m, theta[m]) for m in active}
        yield {"client theta": {m: theta[m] for m in active}, "numbers": (0, 0)}


@reference("fedavg")
def fedavg(case: ReferenceCase) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        w = case.mean({m: case.train(m, w) for m in active})
        yield {"server w": w, "numbers": (case.P, case.P + 1)}


@reference("fedprox", mu=0.3)
def fedprox(case: ReferenceCase, mu: float) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        w = case.mean({m: case.train(m, w, near(w, mu)) for m in active})
        yield {"server w": w}


@reference("scaffold")
def scaffold(case: ReferenceCase) -> Iterator[Stage]:
    """Option II."""
    w, c, own = case.start, torch.zeros(case.P), dict.fromkeys(range(3), torch.zeros(case.P))
    for active in case.rounds:
        sent, new = {}, {}
        for m in active:
            drift = c - own[m]
            sent[m] = case.train(m, w, drift.dot)
            new[m] = own[m] - c + (w - sent[m]) / (case.steps * case.lr)
        c = c + sum(new[m] - own[m] for m in active) / 3
        own |= new
        w = case.mean(sent, equal=True)
        yield {"server w": w, "server c": c}


@reference("feddyn", alpha=0.5)
def feddyn(case: ReferenceCase, alpha: float) -> Iterator[Stage]:
    w, h, g = case.start, torch.zeros(case.P), dict.fromkeys(range(3), torch.zeros(case.P))
    for active in case.rounds:
        sent = {}
        for m in active:
            sent[m] = case.train(m, w, total((-g[m]).dot, near(w, alpha)))
            g[m] = g[m] - alpha * (sent[m] - w)
        h = h - alpha / 3 * sum(sent[m] - w for m in active)
        w = case.mean(sent, equal=True) - h / alpha
        yield {"server w": w, "client g": {m: g[m] for m in active}}


@reference("fedavgm", server_lr=0.7, beta1=0.6)
def fedavgm(case: ReferenceCase, server_lr: float, beta1: float) -> Iterator[Stage]:
    w, v = case.start, torch.zeros(case.P)
    for active in case.rounds:
        v = beta1 * v + case.mean({m: case.train(m, w) - w for m in active})
        w = w + server_lr * v
        yield {"server w": w}


@reference("qffl", q=1.0, curvature="step")
def qffl(case: ReferenceCase, q: float, curvature: str) -> Iterator[Stage]:
    w, L = case.start, 1 / case.lr
    for active in case.rounds:
        top, bottom = torch.zeros(case.P), torch.zeros(())
        for m in active:
            F, step = case.loss(m)(w), L * (w - case.train(m, w))
            top += F**q * step
            bottom += q * F ** (q - 1) * step.square().sum() + L * F**q
        w = w - top / bottom
        yield {"server w": w}


@reference("ditto", lam=0.5)
def ditto(case: ReferenceCase, lam: float) -> Iterator[Stage]:
    w, v = case.start, dict.fromkeys(range(3), case.start)
    for active in case.rounds:
        v |= {m: case.train(m, v[m], near(w, lam)) for m in active}
        w = case.mean({m: case.train(m, w) for m in active})
        yield {"server w": w, "client v": {m: v[m] for m in active}, "numbers": (case.P, case.P + 1)}


@reference("mrmtl", lam=0.5)
def mrmtl(case: ReferenceCase, lam: float) -> Iterator[Stage]:
    theta = dict.fromkeys(range(3), case.start)
    for active in case.rounds:
        w = torch.stack(list(theta.values())).mean(0)
        theta |= {m: case.train(m, theta[m], near(w, lam)) for m in active}
        yield {"server w": torch.stack(list(theta.values())).mean(0), "client theta": {m: theta[m] for m in active}}


@reference("pfedgraph", alpha=0.3, lam=0.2)
def pfedgraph(case: ReferenceCase, alpha: float, lam: float) -> Iterator[Stage]:
    """Shares by bisection of the multiplier, as the condition of the program says: a = max(p − (d + μ)/(2α), 0)."""
    w, models = case.start, dict[int, Tensor]()
    shares: dict[int, dict[int, float]] = {}
    for active in case.rounds:
        size = {j: len(case.y[j]) / sum(len(case.y[k]) for k in models) for j in models}
        new = {}
        for m in active:
            own = shares.get(m, size)
            mix = torch.stack([own[j] * models[j] for j in models]).sum(0) if models else w
            new[m] = case.train(m, mix, partial(_toward, lam, mix))
        models |= new
        p = {j: len(case.y[j]) / sum(len(case.y[k]) for k in models) for j in models}
        for i in models:
            d = {j: -float(cosine_similarity(models[i] - w, models[j] - w, dim=0)) for j in models}
            d = {j: -1.0 if far < -0.9 else far for j, far in d.items()}
            low, high = -10.0, 10.0
            for _ in range(60):
                middle = (low + high) / 2
                shares[i] = {j: max(p[j] - (d[j] + middle) / (2 * alpha), 0.0) for j in models}
                low, high = (middle, high) if sum(shares[i].values()) > 1 else (low, middle)
        yield {
            "server a": torch.tensor([[shares.get(i, p).get(j, 0.0) for j in range(3)] for i in range(3)]),
            "client theta": {m: models[m] for m in active}, "numbers": (case.P, case.P + 1),
        }  # fmt: skip


def _toward(lam: float, mix: Tensor, x: Tensor) -> Tensor:
    return -lam * cosine_similarity(x, mix, dim=0)


# ---- servers that step, models to start from, mixtures, clusters ----


def adaptive(
    case: ReferenceCase, server_lr: float, beta1: float, beta2: float, tau: float,
    squares: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[Stage]:  # fmt: skip
    """Algorithm 2 of Adaptive Federated Optimization, with the line for v that tells its three methods apart."""
    w, m, v = case.start, torch.zeros(case.P), torch.full((case.P,), tau**2)
    for active in case.rounds:
        mean = case.mean({k: case.train(k, w) - w for k in active})
        m, v = beta1 * m + (1 - beta1) * mean, squares(v, mean**2)
        w = w + server_lr * m / (torch.sqrt(v) + tau)
        yield {"server w": w, "server m": m, "server v": v}


@reference("fedadam", server_lr=0.07, beta1=0.8, beta2=0.9, tau=0.05)
def fedadam(case: ReferenceCase, beta2: float, **others: float) -> Iterator[Stage]:
    yield from adaptive(case, beta2=beta2, squares=lambda v, new: beta2 * v + (1 - beta2) * new, **others)


@reference("fedyogi", server_lr=0.07, beta1=0.8, beta2=0.9, tau=0.05)
def fedyogi(case: ReferenceCase, beta2: float, **others: float) -> Iterator[Stage]:
    yield from adaptive(
        case, beta2=beta2, squares=lambda v, new: torch.where(v > new, v - (1 - beta2) * new, v + (1 - beta2) * new),
        **others,
    )  # fmt: skip


@reference("fedadagrad", server_lr=0.07, beta1=0.8, beta2=0.9, tau=0.05)
def fedadagrad(case: ReferenceCase, **options: float) -> Iterator[Stage]:
    yield from adaptive(case, squares=torch.add, **options)


@reference("perfedavg", alpha=0.2, beta=0.1)
def perfedavg(case: ReferenceCase, alpha: float, beta: float) -> Iterator[Stage]:
    """First order: the gradient behind the step, without the Hessian of the step."""
    w = case.start
    for active in case.rounds:
        sent = {}
        for m in active:
            own = w
            for _ in range(case.steps):
                (v,) = slopes(case.loss(m), descend(case.loss(m), own, alpha))
                own = own - beta * v
            sent[m] = own
        w = case.mean(sent, equal=True)
        yield {"server w": w, "numbers": (case.P, case.P)}


@reference("perfedavg_hf", alpha=0.2, beta=0.1, delta=0.1)
def perfedavg_hf(case: ReferenceCase, alpha: float, beta: float, delta: float) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        sent = {}
        for m in active:
            own, f = w, case.loss(m)
            for _ in range(case.steps):
                (v,) = slopes(f, descend(f, own, alpha))
                small = delta / max(1.0, float(v.norm()))
                (ahead,), (behind,) = slopes(f, own + small * v), slopes(f, own - small * v)
                own = own - beta * (v - alpha * (ahead - behind) / (2 * small))
            sent[m] = own
        w = case.mean(sent, equal=True)
        yield {"server w": w}


@reference("pfedme", lam=2.0, inner_steps=3, personal_lr=0.07, beta=1.4)
def pfedme(case: ReferenceCase, lam: float, inner_steps: int, personal_lr: float, beta: float) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        theta, sent = {}, {}
        for m in active:
            theta[m] = sent[m] = w
            for _ in range(case.steps):
                for _ in range(inner_steps):
                    theta[m] = descend(total(case.loss(m), near(sent[m], lam)), theta[m], personal_lr)
                sent[m] = sent[m] - case.lr * lam * (sent[m] - theta[m])
        w = (1 - beta) * w + beta * case.mean(sent, equal=True)
        yield {"server w": w, "client theta": theta}


@reference("apfl", alpha=0.4)
def apfl(case: ReferenceCase, alpha: float) -> Iterator[Stage]:
    """α moves on the first batch of a round."""
    w, v, a = case.start, dict.fromkeys(range(3), case.start), dict.fromkeys(range(3), torch.tensor(alpha))
    for active in case.rounds:
        sent = {}
        for m in active:
            own = w
            for step in range(case.steps):
                (g,) = slopes(case.loss(m), a[m] * v[m] + (1 - a[m]) * own)
                before = a[m]
                if step == 0:
                    a[m] = (a[m] - case.lr * g.dot(v[m] - own)).clamp(0, 1)
                v[m] = v[m] - case.lr * before * g
                own = descend(case.loss(m), own, case.lr)
            sent[m] = own
        w = case.mean(sent, equal=True)
        yield {"server w": w, "client v": {m: v[m] for m in active}, "client alpha": {m: a[m] for m in active}}


def clustered(case: ReferenceCase, equal: bool) -> Iterator[Stage]:
    omega = list(case.server["omega"])
    for active in case.rounds:
        choice = {m: min(range(len(omega)), key=lambda k: float(case.loss(m)(omega[k]))) for m in active}
        sent = {m: case.train(m, omega[choice[m]]) for m in active}
        for k in set(choice.values()):
            omega[k] = case.mean({m: sent[m] for m in active if choice[m] == k}, equal)
        yield {"server omega": torch.stack(omega), "numbers": (len(omega) * case.P, case.P + (2 if equal else 3))}


@reference("ifca", clusters=3)
def ifca(case: ReferenceCase, clusters: int) -> Iterator[Stage]:
    yield from clustered(case, equal=True)


@reference("hypcluster", clusters=2)
def hypcluster(case: ReferenceCase, clusters: int) -> Iterator[Stage]:
    yield from clustered(case, equal=False)


def attending(
    case: ReferenceCase, strength: float, shares: Callable[[int, dict[int, Tensor]], dict[int, float]]
) -> Iterator[Stage]:
    """Each model held near a mix of all that are known; a newcomer begins at their mean."""
    models = dict[int, Tensor]()
    for active in case.rounds:
        new = {}
        for m in active:
            known = torch.stack(list(models.values())).mean(0) if models else case.start
            mix = (
                known if m not in models else torch.stack([a * models[j] for j, a in shares(m, models).items()]).sum(0)
            )
            new[m] = case.train(m, models.get(m, known), near(mix, strength))
        models |= new
        yield {"client theta": {m: models[m] for m in active}}


@reference("fedamp", lam=0.4, alpha=0.5, sigma=3.0, relative=False)
def fedamp(case: ReferenceCase, lam: float, alpha: float, sigma: float, relative: bool) -> Iterator[Stage]:
    def shares(i: int, models: dict[int, Tensor]) -> dict[int, float]:
        far = {j: float((models[i] - models[j]).square().sum()) for j in models if j != i}
        others = {j: alpha / sigma * math.exp(-d / sigma) for j, d in far.items()}
        return others | {i: 1 - sum(others.values())}

    yield from attending(case, lam / alpha, shares)


@reference("heurfedamp", lam=0.4, alpha=0.5, self_weight=0.3, sharpness=2.0)
def heurfedamp(case: ReferenceCase, lam: float, alpha: float, self_weight: float, sharpness: float) -> Iterator[Stage]:
    def shares(i: int, models: dict[int, Tensor]) -> dict[int, float]:
        like = {j: sharpness * cosine_similarity(models[i], models[j], dim=0) for j in models if j != i}
        whole = float(sum(map(torch.exp, like.values())))
        others = {j: (1 - self_weight) * math.exp(float(s)) / whole for j, s in like.items()}
        return others | {i: 1 - sum(others.values())}

    yield from attending(case, lam / alpha, shares)


# ---- own layers ----


@reference("fedper")
def fedper(case: ReferenceCase) -> Iterator[Stage]:
    body, head = case.start[case.body], dict.fromkeys(range(3), case.start[case.head])
    for active in case.rounds:
        theta = {m: case.train(m, torch.cat([body, head[m]])) for m in active}
        head |= {m: theta[m][case.head] for m in active}
        body = case.mean({m: theta[m][case.body] for m in active})
        yield {"server shared": body, "client own": {m: head[m] for m in active}, "numbers": (35, 36)}


@reference("fedrep")
def fedrep(case: ReferenceCase) -> Iterator[Stage]:
    body, head = case.start[case.body], dict.fromkeys(range(3), case.start[case.head])
    for active in case.rounds:
        sent = {}
        for m in active:
            theta = case.train(m, torch.cat([body, head[m]]), only=case.head)
            theta = case.train(m, theta, only=case.body)
            sent[m], head[m] = theta[case.body], theta[case.head]
        body = case.mean(sent, equal=True)
        yield {"server shared": body, "client own": {m: head[m] for m in active}}


@reference("fedbabu")
def fedbabu(case: ReferenceCase) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        w = case.mean({m: case.train(m, w, only=case.body) for m in active})
        yield {"server shared": w[case.body], "numbers": (35, 36)}


@reference("lgfedavg", shared_layers=1)
def lgfedavg(case: ReferenceCase, shared_layers: int) -> Iterator[Stage]:
    head, body = case.start[case.head], dict.fromkeys(range(3), case.start[case.body])
    for active in case.rounds:
        theta = {m: case.train(m, torch.cat([body[m], head])) for m in active}
        body |= {m: theta[m][case.body] for m in active}
        head = case.mean({m: theta[m][case.head] for m in active}, equal=True)
        yield {"server shared": head, "client own": {m: body[m] for m in active}, "numbers": (12, 12)}


# ---- two bodies under one head ----


@reference("fenda")
def fenda(case: ReferenceCase) -> Iterator[Stage]:
    yield from _two_bodies(case, 0.0, 0.0, 1.0)


@reference("perfcl", mu=0.7, gamma=0.4, tau=0.5)
def perfcl(case: ReferenceCase, mu: float, gamma: float, tau: float) -> Iterator[Stage]:
    yield from _two_bodies(case, mu, gamma, tau)


def _two_bodies(case: ReferenceCase, mu: float, gamma: float, tau: float) -> Iterator[Stage]:
    """One vector per client: the own body, the common one, W [3, 6] on the features of both, and b. Own bodies and
    heads begin where the method draws them."""
    start, other = case.client["own"], case.client["head"]
    weight = torch.cat([start[35:44].view(3, 3), other[:9].view(3, 3)], 1).flatten()
    own, head = dict.fromkeys(range(3), start[case.body]), dict.fromkeys(range(3), torch.cat([weight, start[44:]]))
    w, past = case.start[case.body], dict[int, Tensor]()
    for active in case.rounds:
        sent = {}
        for m in active:
            loss = partial(_side_by_side, case, m, mu, gamma, tau, (own[m], w, past.get(m)))
            theta = case.train(m, torch.cat([own[m], w, head[m]]), instead=loss)
            own[m], sent[m], head[m] = theta[:35], theta[35:70], theta[70:]
        past |= sent
        w = case.mean(sent)
        heads = {m: head[m][:18].view(3, 6) for m in active}
        yield {
            "server shared": w, "numbers": (35, 36),
            "client own": {m: torch.cat([own[m], heads[m][:, :3].flatten(), head[m][18:]]) for m in active},
            "client head": {m: torch.cat([heads[m][:, 3:].flatten(), torch.zeros(3)]) for m in active},
        }  # fmt: skip


def _side_by_side(
    case: ReferenceCase, m: int, mu: float, gamma: float, tau: float, before: tuple[Tensor, Tensor, Tensor | None],
    theta: Tensor,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the joint head, and the two contrasts with the bodies of before."""
    of_own, of_common = (case.features(body, case.x[m]) for body in theta[:70].view(2, 35))
    z = torch.cat([of_own, of_common], 1) @ theta[70:88].view(3, 6).T + theta[88:]
    own, received, past = (None if body is None else case.features(body, case.x[m]) for body in before)
    loss = cross_entropy(z, case.y[m])
    if own is None or received is None or past is None:
        return loss
    return loss + mu * _drawn_to(of_common, received, past, tau) + gamma * _drawn_to(of_own, own, received, tau)


def _drawn_to(phi: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    cosines = torch.stack([cosine_similarity(phi, other, dim=1) for other in (near, far)], 1)
    return cross_entropy(cosines / tau, torch.zeros(len(phi), dtype=torch.int64))


# ---- losses at features and logits ----


@reference("moon", mu=0.8, tau=0.4)
def moon(case: ReferenceCase, mu: float, tau: float) -> Iterator[Stage]:
    w, past = case.start, dict[int, Tensor]()
    for active in case.rounds:
        sent = {m: case.train(m, w, partial(_moon, case, m, mu, tau, w, past.get(m))) for m in active}
        past |= sent
        w = case.mean(sent)
        yield {"server w": w, "numbers": (case.P, case.P + 1)}


def _moon(case: ReferenceCase, m: int, mu: float, tau: float, w: Tensor, past: Tensor | None, x: Tensor) -> Tensor:
    if past is None:
        return 0 * x.sum()
    phi, near, far = (case.features(theta, case.x[m]) for theta in (x, w, past))
    return mu * _drawn_to(phi, near, far, tau)


@reference("fedlc", tau=0.5)
def fedlc(case: ReferenceCase, tau: float) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        sent = {}
        for m in active:
            count = torch.bincount(case.y[m], minlength=3)
            shift = torch.where(count > 0, tau * count.float() ** -0.25, torch.inf)
            sent[m] = case.train(m, w, instead=partial(_calibrated, case, m, shift))
        w = case.mean(sent)
        yield {"server w": w}


def _calibrated(case: ReferenceCase, m: int, shift: Tensor, x: Tensor) -> Tensor:
    return cross_entropy(case.logits(x, case.x[m]) - shift, case.y[m])


@reference("fedntd", beta=0.7, tau=2.0)
def fedntd(case: ReferenceCase, beta: float, tau: float) -> Iterator[Stage]:
    w = case.start
    for active in case.rounds:
        w = case.mean({m: case.train(m, w, partial(_not_true, case, m, beta, tau, w)) for m in active})
        yield {"server w": w}


def _not_true(case: ReferenceCase, m: int, beta: float, tau: float, w: Tensor, x: Tensor) -> Tensor:
    """β τ² KL between what w and x say of the classes that an example does not have."""
    others = ~one_hot(case.y[m], 3).bool()
    q, p = ((case.logits(row, case.x[m]) / tau)[others].view(-1, 2) for row in (w, x))
    return beta * tau**2 * kl_div(log_softmax(p, 1), q.softmax(1), reduction="batchmean")


@reference("fedproto", lam=0.5)
def fedproto(case: ReferenceCase, lam: float) -> Iterator[Stage]:
    theta, common = dict.fromkeys(range(3), case.start), dict[int, Tensor]()
    for active in case.rounds:
        sent: dict[int, list[Tensor]] = {}
        for m in active:
            theta[m] = case.train(m, theta[m], partial(_apart, case, m, lam, common))
            for c, mean in case.class_means(m, case.features(theta[m], case.x[m])).items():
                sent.setdefault(c, []).append(mean)
        common |= {c: torch.stack(means).mean(0) for c, means in sent.items()}
        yield {
            "server prototypes": _table(common),
            "client theta": {m: theta[m] for m in active},
            "numbers": (9.75, 12),
        }


def _apart(case: ReferenceCase, m: int, lam: float, prototypes: dict[int, Tensor], x: Tensor) -> Tensor:
    """λ times the mean squared distance of features to the prototypes of their classes."""
    phi = case.features(x, case.x[m])
    far = [(phi[i] - prototypes[c]).square().mean() for i, c in enumerate(case.y[m].tolist()) if c in prototypes]
    return lam * torch.stack([x.sum() * 0, *far]).sum() / len(phi)


def _table(rows: dict[int, Tensor]) -> Tensor:
    """[C, ...] of rows by class; zeros for those without."""
    zeros = torch.zeros_like(next(iter(rows.values())))
    return torch.stack([rows.get(c, zeros) for c in range(3)])


@reference("fedtgp", lam=0.5, server_steps=3, server_lr=0.05, margin=0.4)
def fedtgp(case: ReferenceCase, lam: float, server_steps: int, server_lr: float, margin: float) -> Iterator[Stage]:
    """P̌ and F begin where the method draws them."""
    theta, common = dict.fromkeys(range(3), case.start), dict[int, Tensor]()
    vectors, layers = case.server["vectors"], case.server["layers"]
    for active in case.rounds:
        pairs = []
        for m in active:
            theta[m] = case.train(m, theta[m], partial(_apart, case, m, lam, common))
            pairs += list(case.class_means(m, case.features(theta[m], case.x[m])).items())
        label, sent = torch.tensor([c for c, _ in pairs]), torch.stack([mean for _, mean in pairs])
        Q = torch.stack([sent[label == c].mean(0) for c in sorted(set(label.tolist()))])
        nearest = [min(float(torch.dist(q, p)) for j, p in enumerate(Q) if j != i) for i, q in enumerate(Q)]
        delta = min(max(nearest), margin)

        for _ in range(server_steps):
            g, k = slopes(partial(_contrast, sent, label, delta), vectors, layers)
            vectors, layers = vectors - server_lr * g, layers - server_lr * k
        known = set(common) | set(label.tolist())
        common = {c: _trained(vectors, layers)[c] for c in known}
        yield {
            "server prototypes": _trained(vectors, layers), "client theta": {m: theta[m] for m in active},
            "numbers": (9.75, 12),
        }  # fmt: skip


def _trained(vectors: Tensor, layers: Tensor) -> Tensor:
    (W, b), (V, a) = ((layer[:9].view(3, 3), layer[9:]) for layer in layers)
    hidden = (vectors @ W + b).relu()
    prototypes: Tensor = hidden @ V + a
    return prototypes


def _contrast(sent: Tensor, label: Tensor, delta: float, vectors: Tensor, layers: Tensor) -> Tensor:
    far = torch.linalg.vector_norm(sent[:, None] - _trained(vectors, layers), dim=-1)
    return cross_entropy(-(far + delta * one_hot(label, 3)), label)


@reference("fedgh", server_lr=0.2, server_steps=3)
def fedgh(case: ReferenceCase, server_lr: float, server_steps: int) -> Iterator[Stage]:
    theta, H = dict.fromkeys(range(3), case.start), case.start[case.head]
    for active in case.rounds:
        pairs = []
        for m in active:
            theta[m] = case.train(m, torch.cat([theta[m][case.body], H]))
            pairs += list(case.class_means(m, case.features(theta[m], case.x[m])).items())
        label, sent = torch.tensor([c for c, _ in pairs]), torch.stack([mean for _, mean in pairs])
        for _ in range(server_steps):
            H = descend(partial(_head_loss, sent, label), H, server_lr)
        yield {
            "server weight": H[:9].view(3, 3), "server bias": H[9:], "client theta": {m: theta[m] for m in active},
            "numbers": (12, 9.75),
        }  # fmt: skip


def _head_loss(sent: Tensor, label: Tensor, h: Tensor) -> Tensor:
    return cross_entropy(sent @ h[:9].view(3, 3).T + h[9:], label)


@reference("fd", gamma=0.7)
def fd(case: ReferenceCase, gamma: float) -> Iterator[Stage]:
    theta, answers = dict.fromkeys(range(3), case.start), dict[int, dict[int, Tensor]]()
    for active in case.rounds:
        new = {}
        for m in active:
            others = {c: [s[c] for j, s in answers.items() if j != m and c in s] for c in range(3)}
            target = {c: torch.stack(rows).mean(0) for c, rows in others.items() if rows}

            theta[m] = case.train(m, theta[m], partial(_taught, case, m, gamma, target))
            new[m] = case.class_means(m, case.logits(theta[m], case.x[m]).softmax(1))
        answers |= new
        blank = torch.zeros(3, 3)
        yield {
            "server predictions": torch.stack([_table(answers[m]) if m in answers else blank for m in range(3)]),
            "client theta": {m: theta[m] for m in active}, "numbers": (9.75, 9.75),
        }  # fmt: skip


def _taught(case: ReferenceCase, m: int, gamma: float, target: dict[int, Tensor], x: Tensor) -> Tensor:
    """γ times the cross-entropy to the target of an example's class."""
    log_p = log_softmax(case.logits(x, case.x[m]), 1)
    far = [-target[c] @ log_p[i] for i, c in enumerate(case.y[m].tolist()) if c in target]
    return gamma * torch.stack([x.sum() * 0, *far]).sum() / len(log_p)


# ---- two models that teach each other ----


@reference("fml", alpha=0.4, beta=0.7)
def fml(case: ReferenceCase, alpha: float, beta: float) -> Iterator[Stage]:
    w, own = case.start, dict.fromkeys(range(3), case.start)
    for active in case.rounds:
        sent = {}
        for m in active:
            theta, meme = own[m], w
            for _ in range(case.steps):
                theta, meme = (
                    descend(partial(_mutual, case, m, alpha, meme), theta, case.lr),
                    descend(partial(_mutual, case, m, beta, theta), meme, case.lr),
                )
            own[m], sent[m] = theta, meme
        w = case.mean(sent)
        yield {"server w": w, "client theta": {m: own[m] for m in active}, "numbers": (case.P, case.P + 1)}


def _mutual(case: ReferenceCase, m: int, share: float, teacher: Tensor, x: Tensor) -> Tensor:
    return share * case.loss(m)(x) + (1 - share) * _from_teacher(case, m, teacher, x)


def _from_teacher(case: ReferenceCase, m: int, teacher: Tensor, x: Tensor) -> Tensor:
    """KL(p_teacher ‖ p) on the client's examples."""
    p = case.logits(teacher, case.x[m]).softmax(1)
    return kl_div(log_softmax(case.logits(x, case.x[m]), 1), p, reduction="batchmean")


@reference("fedkd", hidden=0.8)
def fedkd(case: ReferenceCase, hidden: float) -> Iterator[Stage]:
    """W begins where the method draws it."""
    w, own, W = case.start, dict.fromkeys(range(3), case.start), dict.fromkeys(range(3), case.client["projection"])
    for active in case.rounds:
        sent = {}
        for m in active:
            t, s = own[m], w
            for _ in range(case.steps):
                D = float(case.loss(m)(t) + case.loss(m)(s))
                at_t, at_s, at_W = slopes(partial(_features_apart, case, m, hidden / D), t, s, W[m])
                t, s, W[m] = (
                    descend(partial(_adaptive, case, m, D, s), t, case.lr) - case.lr * at_t,
                    descend(partial(_adaptive, case, m, D, t), s, case.lr) - case.lr * at_s,
                    W[m] - case.lr * at_W,
                )
            own[m], sent[m] = t, s
        w = case.mean(sent)
        yield {
            "server w": w, "client theta": {m: own[m] for m in active}, "client projection": {m: W[m] for m in active},
            "numbers": (case.P, case.P + 1),
        }  # fmt: skip


def _adaptive(case: ReferenceCase, m: int, D: float, teacher: Tensor, x: Tensor) -> Tensor:
    return case.loss(m)(x) + _from_teacher(case, m, teacher, x) / D


def _features_apart(case: ReferenceCase, m: int, strength: float, t: Tensor, s: Tensor, W: Tensor) -> Tensor:
    return strength * mse_loss(case.features(t, case.x[m]), case.features(s, case.x[m]) @ W.T)


# ---- networks that make models ----


@reference("pefll", server_lr=0.01, descriptor=2, hidden=5, hidden_layers=1)
def pefll(case: ReferenceCase, server_lr: float, descriptor: int, hidden: int, hidden_layers: int) -> Iterator[Stage]:
    """All parameters begin where the method draws them. The step is torch's Adam on the gradient of Σ ⟨−Δθ_i, θ_i⟩ / n,
    through both networks at once."""
    parameters = {name: case.server[f"eta.{name}"].clone().requires_grad_() for name in _PEFLL}
    optimizer = torch.optim.Adam(parameters.values(), lr=server_lr, eps=1e-5)
    for active in case.rounds:
        theta = {m: _generated(case, m, hidden, *parameters.values()) for m in active}
        delta = {m: case.train(m, theta[m].detach()) - theta[m].detach() for m in active}
        goal = torch.stack([-delta[m] @ theta[m] for m in active]).mean()
        for value, slope in zip(parameters.values(), torch.autograd.grad(goal, [*parameters.values()]), strict=True):
            value.grad = slope
        optimizer.step()
        yield {f"server eta.{name}": value.detach() for name, value in parameters.items()}


_PEFLL = ("body", "top", "trunk", "head", "bias")


def _generated(
    case: ReferenceCase, m: int, hidden: int, body: Tensor, top: Tensor, trunk: Tensor, head: Tensor, bias: Tensor
) -> Tensor:
    """θ [P] of the client's examples."""
    inputs = torch.cat([case.features(body, case.x[m]), one_hot(case.y[m], 3).float()], 1)
    v = _through(top, _through(top, inputs, 0, 6, hidden).relu(), 7 * hidden, hidden, 2).mean(0)
    f = _through(trunk, _through(trunk, v, 0, 2, hidden).relu(), 3 * hidden, hidden, hidden)
    return head @ f + bias


def _through(numbers: Tensor, x: Tensor, start: int, inputs: int, outputs: int) -> Tensor:
    """x through one layer of a network whose weights come before their biases."""
    stop = start + inputs * outputs
    return x @ numbers[start:stop].view(outputs, inputs).T + numbers[stop : stop + outputs]
