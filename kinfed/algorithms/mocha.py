"""MOCHA: linear models of all clients, and how the clients are related, learned together (the convex original).

Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning, NeurIPS 2017, Algorithm 1, on the probabilistic
regularizer (their Appendix B, after Zhang and Yeung 2010). For networks there is no such method; what papers run on
networks under this name is `mocha_deep`, another thing.

    min_{W, Ω}  Σ_t (1/n_t) Σ_i hinge(y_i ⟨w_t, x_i⟩) + (λ/2) tr(W Ω Wᵀ),      Σ = Ω⁻¹,  tr Σ = 1

solved in its dual, in which every example of a client has a variable β_i ∈ [0, 1] (one per class, against the rest):

    b_t = (1/n_t) Σ_i β_i y_i x_i,      w_t = (1/λ) Σ_t' Σ_tt' b_t'                                        (identity)

  W step, at client t, from w_t and q_t = ρ Σ_tt / λ, with ρ = max_t Σ_t' |Σ_tt'| / Σ_tt: coordinate ascent on
  examples in random order, each step exact,

    β_i ← clip(β_i + n_t (1 − y_i ⟨u, x_i⟩) / (q_t ‖x_i‖²), 0, 1),     u = w_t + q_t (b_t − b_t at the start)

  and b_t goes to the server. ρ makes the local steps safe to add up: the dual never falls, whichever clients take part
  and however far each has come (stragglers' partial work counts, as the paper intends).

  Σ step, every `sigma_every` rounds:  Σ = (WᵀW)^½ / tr (WᵀW)^½, eigenvalues not below 1e-7.

`sigma_every = 0` keeps Σ = I/m: independent support vector machines with (λ m / 2) ‖w_t‖².

Who keeps what: the client its β, one number per training example and class, padded to the largest client of the
federation (4 C max_t n_t bytes per client: 1,000 clients of up to 3,400 examples in 10 classes take 136 MB, in files
with state = "disk"); the server b_t and w_t of all clients and Σ (m² numbers; a Σ step takes O(m³)). A client never
sees another one's w.

Decisions: the loss of a client is a mean over its examples, 1/n_t, as in the released code; the paper writes a sum.
Clients send b_t itself, not its change: as many bytes, no drift, and a lost reply costs nothing. W is always
computed from b and Σ, so the identity also holds after a Σ step (the released code lets it go). The bias is the weight
of a feature that is always 1, and is regularized. Clients that have not replied have no column of W: they keep
Σ_tt = 1/m, unrelated to others, and the others' block has the rest of the trace. The number of coordinate steps is the
number of examples in the round's local training (steps x batch, or epochs x n_t), equal for all methods; there is no
learning rate. The loss in reports is the cross-entropy of scores that were not trained for it: compare accuracies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.author import Algorithm, Cohort, ConfigError, Population, RoundInfo, Split, Task, Tree, option, rng
from kinfed.engine import Dense, FeedForwardNet, ModuleTask
from kinfed.errors import ModelError

LEAST_EIGENVALUE = 1e-7  # of Σ
SHOWN_RELATIONS = 40  # clients at most whose relations go to the journal, as a matrix
STEPS_AT_ONCE = 64  # examples per client that are fetched together


@dataclass
class Server(Tree):
    b: Tensor  # [N, P] what the clients' dual variables add up to
    w: Tensor  # [N, P] w_t = (1/λ) Σ_t' Σ_tt' b_t'
    sigma: Tensor  # [N, N] float64 relations of clients, Σ
    q: Tensor  # [N] ρ Σ_tt / λ
    seen: Tensor  # [N] bool
    rounds: Tensor  # [] int64, those in which a client replied


@dataclass
class Client(Tree):
    beta: Tensor  # [n, most examples of any client, C] dual variables in [0, 1]; 0 beyond the client's own examples


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]
    q: Tensor  # [n]


@dataclass
class Up(Tree):
    b: Tensor  # [n, P]


@dataclass(frozen=True)
class Mocha(Algorithm[Server, Client, Down, Up]):
    lam: float = option(1e-3, "λ; a client alone faces (λ m / 2) ‖w‖², m the number of clients", gt=0)
    sigma_every: int = option(10, "rounds between updates of the clients' relations Σ; 0 leaves them unrelated", ge=0)

    # The order of coordinates is drawn by client id.
    traits = frozenset({"needs classes", "keeps stragglers", "draws by client"})
    traits |= {"no momentum", "no weight decay", "no example weights"}
    leaks = "the sum of its examples weighted by dual variables"
    single_updates = "keeps what every client sent and learns from it how clients are related"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.augment is not None:
            raise ConfigError(
                f"MOCHA has a dual variable for every training example, and changed examples (augment = "
                f"{self.training.augment!r}) have none; turn augmentation off for mocha"
            )

    def check(self, task: Task, population: Population) -> None:
        linear_layer(task)
        if isinstance(task, ModuleTask) and task.start is not None:
            raise ConfigError(
                "MOCHA starts from dual variables of zero and cannot take up a warm start; run it without"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        m = population.num_clients
        zeros = torch.zeros(m, task.num_params, device=task.device)
        sigma = torch.eye(m, dtype=torch.float64) / m  # on the CPU: decisions in float64 are not for every device
        return Server(zeros, zeros, sigma, self._q(sigma), torch.zeros(m, dtype=torch.bool), torch.tensor(0))

    def init_client(self, task: Task, data: Cohort) -> Client:
        layer = linear_layer(task)
        return Client(torch.zeros(1, 1, 1, device=task.device).expand(len(data), data.train.longest, layer.outputs))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w[ids], server.q[ids])

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        layer, split = linear_layer(task), data.train
        beta = ascend(layer, client.beta, down, split, self._num_coordinates(split))
        return Client(beta), Up(dual_sum(layer, beta, split))

    def _num_coordinates(self, split: Split) -> Tensor:
        """[n] int64: as many examples as the round's local training holds; of stragglers, the part that they finish."""
        training, count = self.training, split.count
        total = count.clamp_max(training.batch) * training.num_steps(count)
        if training.epochs is not None:
            total = count * training.epochs
        if split.effort is None:
            return total
        return torch.ceil(split.effort.to(torch.float64) * total - 1e-6).clamp_min(1).to(torch.int64)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        b, seen, rounds = server.b.clone(), server.seen.clone(), server.rounds + 1
        b[ids], seen[ids] = up.b, True
        sigma = server.sigma
        if self.sigma_every and int(rounds) % self.sigma_every == 0:
            sigma = relations(self._w(sigma, b), seen)
        return Server(b, self._w(sigma, b).to(b), sigma, self._q(sigma), seen, rounds)

    def _w(self, sigma: Tensor, b: Tensor) -> Tensor:
        """[N, P] float64: (1/λ) Σ_t' Σ_tt' b_t'."""
        return sigma @ b.to("cpu", torch.float64) / self.lam

    def _q(self, sigma: Tensor) -> Tensor:
        own = sigma.diagonal()
        rho = (sigma.abs().sum(1) / own).max()
        return (rho * own / self.lam).to(torch.float32)

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        raise ConfigError(
            "MOCHA knows how clients are related from what they sent while it ran, and a newcomer has sent nothing; "
            "run again with it, or adopt from another method"
        )

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return down.w

    def figures(self, server: Server) -> dict[str, Any]:
        own = server.sigma.diagonal()
        total = server.sigma.abs().sum(1)
        figures: dict[str, Any] = {"rho": float((total / own).max()), "own_share": float((own / total).mean())}
        if len(own) <= SHOWN_RELATIONS:
            figures["relations"] = server.sigma / (own[:, None] * own).sqrt()  # as a correlation is to a covariance
        return figures


def linear_layer(task: Task) -> Dense:
    """The one linear layer that the model is; any other model is refused."""
    net = FeedForwardNet.from_module(task.module) if isinstance(task, ModuleTask) else None
    if net is None or len(net.steps) != 1:
        layers = ", ".join(task.layer_names())
        raise ModelError(
            "MOCHA is a method for linear models: its dual needs a loss that is convex in the parameters; this model "
            f"has layers {layers}. Choose model mlr (nn.Flatten and one nn.Linear), or mocha_deep for networks"
        )
    return net.steps[0][0]


def ascend(layer: Dense, beta: Tensor, down: Down, split: Split, steps: Tensor) -> Tensor:
    """[n, L, C]: the dual variables after `steps` [n] exact coordinate steps of every client, all classes at once.

    A step moves ⟨u, x_r⟩ of a later one by the product of their examples. With these products known, many steps are
    taken on the scores alone, and u follows once for all of them."""
    order = torch.argsort(steps, descending=True, stable=True)  # who still steps is then always a prefix
    split, steps = split.take(order), steps[order]
    place = coordinates(split, steps)
    u, q = joined(layer, down.w)[order].clone(), down.q[order]
    new = beta[order].clone(memory_format=torch.contiguous_format)
    variables = new.view(-1, new.shape[2])  # [n L, C]
    at = (place + new.shape[1] * torch.arange(len(place))[:, None]).to(new.device)
    one = u.new_ones(())
    step_size = q / split.count.to(u)  # q_t / n_t
    for begin, end in spans(steps):
        n = int((steps > begin).sum())
        x, y = examples(layer, split.take(slice(0, n)), place[:n, begin:end])
        product = torch.bmm(x, x.transpose(1, 2)).mul_(step_size[:n, None, None])  # [n, S, S]  ⟨x_s, x_r⟩ q_t / n_t
        score = torch.bmm(x, u[:n].transpose(1, 2))  # [n, S, C]  ⟨u, x_s⟩
        rate = 1 / product.diagonal(dim1=1, dim2=2)[..., None]  # n_t / (q_t ‖x_s‖²)
        change = torch.empty_like(score)  # of β_s y_s
        by_step = (t.unbind(1) for t in (at[:n, begin:end], y, score, rate, product[..., None], change))
        for i, y_s, score_s, rate_s, product_s, change_s in zip(*by_step, strict=True):
            old = variables.index_select(0, i)
            moved = torch.addcmul(old, torch.addcmul(one, y_s, score_s, value=-1), rate_s).clamp_(0, 1)
            variables.index_copy_(0, i, moved)
            torch.mul(moved - old, y_s, out=change_s)
            score.baddbmm_(product_s, change_s[:, None])
        u[:n].baddbmm_(change.mul_(step_size[:n, None, None]).transpose(1, 2), x)
    return new[torch.argsort(order)]


def spans(steps: Tensor) -> Iterator[tuple[int, int]]:
    """Steps begin..end, at most STEPS_AT_ONCE of them, that the same clients take; `steps` [n] falls."""
    begin = 0
    for end in torch.unique(steps).tolist():
        while begin < end:
            stop = min(begin + STEPS_AT_ONCE, end)
            yield begin, stop
            begin = stop


def coordinates(split: Split, steps: Tensor) -> Tensor:
    """[n, max steps]: which of its examples each client visits: all of them in random order, then again in another."""
    step = torch.arange(int(steps.max()))
    epoch, inside = step // split.count[:, None], step % split.count[:, None]
    place = torch.zeros_like(epoch)
    key = rng.fold(rng.root(split.seed, "mocha"), split.round, split.ids)
    column = torch.arange(int(split.count.max()))
    for number in range(int((-(-steps // split.count)).max())):
        draw = rng.bits(rng.fold(key, number), len(column))
        draw.masked_fill_(column >= split.count[:, None], torch.iinfo(torch.int64).max)
        visit = torch.argsort(draw, dim=1, stable=True).gather(1, inside)
        place = torch.where(epoch == number, visit, place)
    return place


def examples(layer: Dense, split: Split, place: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, S, D] and y [n, S, C] = ±1 of the clients' examples at these places; a feature of 1 stands for the bias."""
    index = split.rows[split.start[:, None] + place[: len(split.count)]]
    return features_and_signs(layer, split.features.gather(index), split.targets(index))


def features_and_signs(layer: Dense, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    x = x.flatten(2)
    if layer.bias is not None:
        x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
    return x, torch.nn.functional.one_hot(label, layer.outputs).to(x.dtype).mul_(2).sub_(1)


def dual_sum(layer: Dense, beta: Tensor, split: Split) -> Tensor:
    """[n, P]: b_t = (1/n_t) Σ_i β_i y_i x_i."""
    total = beta.new_zeros(len(beta), layer.outputs, layer.inputs + (layer.bias is not None))
    begin = 0
    for rows, batch in split.in_order():
        x, y = features_and_signs(layer, batch.x, batch.y)
        share = beta[rows, begin : begin + x.shape[1]] * y * batch.weight[..., None]
        total[rows] += torch.bmm(share.transpose(1, 2), x)
        begin += x.shape[1]
    return parted(layer, total / split.count.to(total)[:, None, None])


def relations(w: Tensor, seen: Tensor) -> Tensor:
    """[N, N] float64: Σ = (WᵀW)^½ / tr for the clients that have a model, 1/N for each of the others alone."""
    m, known = len(seen), seen.nonzero().squeeze(1)
    value, vector = torch.linalg.eigh(w[known] @ w[known].T)
    root = value.clamp_min(0).sqrt()
    sigma = torch.eye(m, dtype=torch.float64) / m
    if float(root.sum()) > 0:
        root = (root / root.sum()).clamp_min(LEAST_EIGENVALUE)
        sigma[known[:, None], known] = (vector * (root / root.sum())) @ vector.T * (len(known) / m)
    return (sigma + sigma.T) / 2


def joined(layer: Dense, theta: Tensor) -> Tensor:
    """[n, C, D]: the weights of each class, the bias as the last."""
    bias = layer.bias_of(theta)
    return layer.weight_of(theta) if bias is None else torch.cat([layer.weight_of(theta), bias[..., None]], 2)


def parted(layer: Dense, w: Tensor) -> Tensor:
    """Rows [n, P] from w [n, C, D]: the inverse of `joined`."""
    theta = w.new_empty(len(w), w[0].numel())
    layer.weight_of(theta).copy_(w[..., : layer.inputs])
    bias = layer.bias_of(theta)
    if bias is not None:
        bias.copy_(w[..., layer.inputs])
    return theta
