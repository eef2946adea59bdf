"""FedBABU: a base trained under a head that stays random, fine-tuned at every client.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, Algorithm 1.

    min over the base  Σ_m p_m f_m(base, head₀),      head₀ the common random start, which is never trained

Classes are told apart by the base alone, since everybody's head is the same and stays. The personal model is a copy of
(base, head₀) after `tune_steps` local steps on all of it (the paper's), on the head or on the base; it is made anew
whenever it is asked for, for all clients alike, whether they ever trained or not. tune_steps = 0 deploys the server's
model itself; `finetune`, which all methods have, would come on top. An empty head (`head_layers = 0`) is FedAvg's
training, bit for bit.

What travels: the base; the head comes from the seed. Clients keep nothing. Weights are by examples; the authors average
equally, on balanced data. Steps of the head are left out altogether: zeroing its gradient and stepping all the same, as
one collection does, lets weight decay shrink the head. Running statistics (of BatchNorm, say) go with their layer.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm, PrivacyProfile, ServerModels, gradient_steps
from kinfed.algorithms.common.averaging import Weights, example_counts
from kinfed.algorithms.common.partial import Down, SharesPart, Up
from kinfed.author import ColumnSplit, ConfigError, Nothing, Task, Tree, last_layers, option, parse_patterns, sgd
from kinfed.data import Cohort, LocalTraining, Population


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the base
    head: Tensor  # [P − G] head₀, which stays and never travels
    is_head: Tensor  # [P] bool: its columns


@dataclass(frozen=True)
class FedBABU(SharesPart[Server, Nothing, Down, Up], AveragingAlgorithm[Server, Nothing, Down, Up]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")
    head_layers: int = option(1, "how many of the last layers stay at their start", ge=0)
    head: str = option("", "layers of the head by name or pattern, separated by commas, instead of head_layers")
    tune_steps: int = option(20, "steps that make the server's model a personal one", ge=0)
    tune_lr: float | None = option(None, "rate of those steps; that of the round by default", gt=0)
    tune_part: Literal["full", "head", "body"] = option("full", "what those steps train")

    def split(self, task: Task) -> ColumnSplit:
        """The head's columns are "own"."""
        head = parse_patterns(self.head) or last_layers(task.slots, self.head_layers)
        return ColumnSplit.owning(task.slots, head)

    def check(self, task: Task, population: Population) -> None:
        split = self.split(task)
        if not split.shared:
            raise ConfigError("FedBABU trains the layers below the head, and the head is the whole model; shorten it")
        if self.tune_part == "head" and not split.own and self.tune_steps:
            raise ConfigError("FedBABU's tune_part = head: there is no head; set head_layers to 1 or more")

    def init_server(self, task: Task, population: Population) -> Server:
        split, start = self.split(task), task.init(population.seed)
        return Server(split.take_shared(start).clone(), split.take_own(start).clone(), split.own_mask)

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.shared.expand(len(ids), -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        split = self.split(task)
        theta = self.at_start(task, down.shared, data.seed)
        mask = split.shared_mask if split.own else None
        theta = sgd(task, theta, data.train.batches(self.training), mask=mask)
        return client, Up(split.take_shared(theta) - down.shared, example_counts(self.weights, data))

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        split = self.split(task)
        theta = self.at_start(task, down.shared, data.seed)
        if not self.tune_steps:
            return theta
        masks = {"full": None, "head": split.own_mask, "body": split.shared_mask}
        return sgd(task, theta, data.train.batches(self._tuning, stream="adapt"), mask=masks[self.tune_part])

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(ColumnSplit.from_mask(server.is_head).join(server.head, server.shared)[None])

    @property
    def _tuning(self) -> LocalTraining:
        training = self.training.with_steps(self.tune_steps)
        return training if self.tune_lr is None else replace(training, lr=self.tune_lr, lr_decay=1.0, lr_floor=0.0)

    def privacy(self, count: Tensor) -> PrivacyProfile:
        tuning = {1: self._tuning.num_steps(count)} if self.tune_steps else {}
        return gradient_steps(self.training.num_steps(count), per_personalization=tuning, weights=self.weights)
