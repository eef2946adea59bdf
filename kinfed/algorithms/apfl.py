"""APFL: each client mixes a model of its own with the global one, and learns how much.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, 2020, Algorithm 1.

    v̄_m = α_m v_m + (1 − α_m) w_m,     α_m ← α_m − η ⟨∇f_m(v̄_m), v_m − w_m⟩

Per step:  v ← v − η α ∇f(v̄),   w_m ← w_m − η ∇f(w_m);  the server averages w_m. α = 0 is FedAvg's global model for
everyone, α = 1 local training.

Decisions: parameters are mixed (a widely used implementation mixes outputs); α moves once per round, on the first
batch, as in the authors' code (`alpha_every_step` for the paper's text); no extra 0.02 α term; v is never
overwritten by the mixture. In the first round v = w, so α stays where it starts. v and α both step with the gradient
at the old mixture, so v's step has the old α.

Running statistics (of BatchNorm, say) are measured, not mixed: those of v are the mixture's own, which the forward
passes at v̄ move, and the personal model has them. Until a client has trained they are w's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, example_counts, own_or_server
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import Cohort, GradientStep, Learn, Mix, Range, Task, Tree, mixture, option, run_program


@dataclass
class Client(Tree):
    v: Tensor  # [n, P]
    alpha: Tensor  # [n] float64 in [0, 1]
    seen: Tensor  # [n] bool: has trained


@dataclass(frozen=True)
class APFL(AveragesOneModel[Client]):
    alpha: float = option(0.5, "α at the start", ge=0, le=1, tune=Range(0.0, 1.0, log=False))
    adaptive: bool = option(True, "learn α; otherwise it stays")
    alpha_every_step: bool = option(False, "move α at every step instead of once per round")
    weights: Weights = option("equal", "weights of the average: equal (paper), or by N_m")

    traits = frozenset({"no momentum"})
    gradients = 2

    def init_client(self, task: Task, data: Cohort) -> Client:
        alpha = torch.full((len(data),), self.alpha, dtype=torch.float64, device=task.device)
        return Client(task.init(data.seed).expand(len(data), -1), alpha, torch.zeros(len(data), dtype=torch.bool))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        batches = data.train.batches(self.training)
        eta, decay = batches.lr, self.training.weight_decay
        w, v, alpha = down.w.clone(), own_statistics(task, client, down.w), client.alpha.clone()
        learn = Learn("alpha", "w", "v", eta, first_only=not self.alpha_every_step)  # α ← α − η ⟨∇f(v̄), v − w⟩
        program = (
            Mix("mixed", "w", "v", "alpha"),  # v̄ = α v + (1 − α) w
            GradientStep("v", eta, at="mixed", number="alpha", decay=decay, learn=learn if self.adaptive else None),
            GradientStep("w", eta, decay=decay),
        )
        run_program(task, [batches], program, {"w": w, "v": v}, {"alpha": alpha})
        up = DeltaUp(w.sub_(down.w), example_counts(self.weights, data))
        return Client(v, alpha, torch.ones_like(client.seen)), up

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return mixture(down.w, own_statistics(task, client, down.w), client.alpha, task.trainable)

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"alpha": client.alpha}


def own_statistics(task: Task, client: Client, w: Tensor) -> Tensor:
    """A copy of v [n, P]; of clients that have not trained yet with the running statistics of w."""
    v, behind = client.v.clone(), slice(task.trainable.stop, None)
    v[:, behind] = own_or_server(client.seen, v[:, behind], w[:, behind])
    return v
