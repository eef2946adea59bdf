"""The gate of a client: whatever leaves its node passes here, by a rule of the owner's or at a price in the ledger.

    what leaves             rule                                                        price
    greeting                name, group, key; columns, shape and numbers of examples    none: these are not protected
    sums, statistics        refused under privacy, but with sums = "yes"                none: not covered by epsilon
    update                  methods, min_noise, strict, require_secure_aggregation      under privacy, of training rows
    keys, shares            those of a secure sum (kinfed.deploy.secure)                none: they tell nothing alone
    masked update           least_clients, peers; noise of its own under user_epsilon   under user-level noise of the
                                                                                        nodes, of the whole client
    all of a search         evaluate names test; refused where the owner protects       none: it is exact; under dp_
                            anything, but under dp_ settings of its run: then updates   of updates, and of figures
                            are private, figures noised, and those of tests stay        that of all rows
    description of a table  describe, smallest_count; under privacy noised counts of    under privacy, of all rows
                            gaps alone, refused where only secure sums leave; or
                            sums = "yes"
    scores of models that   evaluate, smallest_count; not of rows that private          as scores
    a server brings         training uses
    scores                  evaluate; never of rows that private training uses          under min_noise or epsilon, of
                                                                                        the rows; or exact_scores; none
                                                                                        leave under user_epsilon
    refusal, error          no text that may quote examples, no path of the machine     none

`Node.answer` sends a `Released` answer and no other, and only `Gate.release`, `Gate.released_errors` and requests at a
price (kinfed.deploy.node.gated_requests) make one.

Under differential privacy

  * noise and samples are drawn for this answer alone: from the client's secret, a digest of all that the answer depends
    on (the order, the run's settings, the node's settings, data and state) and random bytes that are then forgotten;
  * its cost is held against the owner's budget before anything is computed, and is in the ledger, on the disk, before
    anything is kept or leaves;
  * the answer is kept. The same request again, after an answer was lost on the way, gets that answer and costs
    nothing; once a later answer has taken its place, the request is refused. It never gets noise anew.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.data import SPLITS
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.privacy_log import (
    COUNTS,
    HELD_OUT_ROWS,
    SCORES,
    SUM,
    TRAINING_ROWS,
    WHOLE_CLIENT,
    Answered,
    ByNoise,
    Page,
    PrivacyLog,
)
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.node.vault_entry import VaultEntry, now
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.deploy.transport.wire import MASK, SCORE, MessageError, Packet, bundled
from kinfed.errors import ConfigError, KinfedError, ModelError, StorageError
from kinfed.privacy import Event, Events, merge, new_nonce
from kinfed.updates import user_level

if TYPE_CHECKING:
    pass

SPARE_BYTES = 1 << 16  # on a disk, beside what an answer is known to take
LARGEST_LOSS = 5.0  # of one row, in figures of an evaluation that get noise
_WITHOUT_EXAMPLES = (ConfigError, MessageError, ModelError, StorageError)  # errors whose text quotes none
_ONE_SUM = (Event(1.0, 1, 1),)  # the server knows who is in a sum: nothing is hidden by sampling
_PATH = re.compile(r"(?<![\w.<])(?:~|[A-Za-z]:)?[/\\][^\s'\"<>:;,()]+")
_LOG = logging.getLogger("kinfed.node")
Noise = Callable[[Tensor], Tensor]  # for sums [..., n]: independent numbers of that shape


class Withheld(KinfedError):
    """An error at a node whose text stays there."""


@dataclass(frozen=True)
class Released(Packet):
    """An answer that has passed the gate. Nothing else is sent."""

    rules: Mapping[str, int] = field(default_factory=dict, compare=False)  # how often each let something out

    @classmethod
    def of(cls, answer: Packet, rule: str) -> Released:
        return cls(answer.header, answer.groups, {rule: 1})

    @classmethod
    def together(cls, field: str, answers: Sequence[Released]) -> Released:
        """One answer with the headers of several, for a node of several clients."""
        return cls({field: [answer.header for answer in answers]}, rules=_added(answers))

    @classmethod
    def bundled(cls, answers: Sequence[Released]) -> Released:
        """Answers to requests that came together."""
        whole = bundled(answers)
        return cls(whole.header, whole.groups, _added(answers))

    @classmethod
    def of_error(cls, error: Exception) -> Released:
        """An error that has passed the gate, in the place of one answer of several."""
        return cls({"error": f"{type(error).__name__}: {error}"}, rules={f"error: {type(error).__name__}": 1})


def _added(answers: Sequence[Released]) -> Counter[str]:
    total: Counter[str] = Counter()
    for answer in answers:
        total.update(answer.rules)
    return total


@dataclass
class _Counted:
    """What the ledger is to know of answers that leave in one message."""

    rules: Counter[tuple[str, str]] = field(default_factory=Counter)  # how often, by run and rule
    models: dict[str, str] = field(default_factory=dict)  # runs by digests of models, trained for secure sums


class Gate:
    def __init__(self, settings: NodeSettings, deployment: Deployment) -> None:
        self.settings, self.deployment = settings, deployment
        self.client, self.rules, self.algorithm = settings.client, settings.rules, deployment.algorithm
        self.least_rate = 0.0  # at which samples count at least; a search gives its parts one rate
        self._together: _Counted | None = None
        self.spent: dict[str, tuple[float, float]] = {}  # epsilon and the owner's limit, by what a new price is for

    def within(self, other: Gate) -> None:
        """Count with another gate of the same client, for as long as that counts answers of one message."""
        self._together = other._together

    @cached_property
    def vault(self) -> Vault:
        return Vault(self.settings.vault, self.settings.counter)

    @cached_property
    def ledger(self) -> PrivacyLog:
        return self.vault.privacy_log(self.settings.owner)

    # ---- what leaves ----

    def release(self, kind: str, answer: Packet, rule: str, run: str = "") -> Released:
        """Let an answer out that costs nothing, by a rule; the ledger counts it first."""
        if self._together is not None:
            self._together.rules[run, f"{kind}: {rule}"] += 1
            return Released.of(answer, rule)
        with self.ledger.locked():
            self.ledger.count(run, f"{kind}: {rule}")
        return Released.of(answer, rule)

    @contextmanager
    def counted_together(self) -> Iterator[None]:
        """Around answers that leave in one message: the ledger counts them at the end of the block, before they do, and
        has the models that they were trained from."""
        self._together = counted = _Counted()
        try:
            yield
        finally:
            self._together = None
        with self.ledger.locked():
            if counted.models:
                self._check_models(counted.models)
                self.ledger.note_models(counted.models)
            self.ledger.count_all(counted.rules)

    @contextmanager
    def released_errors(self) -> Iterator[None]:
        """Let errors out: of those that may quote examples the kind alone, of all others a text without paths."""
        try:
            yield
        except Exception as error:
            known = isinstance(error, (Refused, MessageError))
            _LOG.warning("no answer for %s: %s", self.client, error, exc_info=None if known else error)
            try:
                with self.ledger.locked():
                    self.ledger.count("", f"error: {type(error).__name__}")
            except KinfedError as broken:  # then this is all that leaves
                error = broken
            raise error_outside(error, self.client, self.settings.paths) from None

    # ---- what may be asked ----

    @property
    def _private(self) -> bool:
        return self.deployment.run.privacy is not None or self.rules.demands_privacy

    @property
    def noises_update(self) -> bool:
        """Whether the client's share of noise in a secure sum hides all that its update tells."""
        privacy = self.deployment.run.user_privacy
        return privacy is not None and privacy.at_nodes

    def check_run(self, count: Tensor, noise: float) -> None:
        """Refuse runs that this client takes no part in. `count` [1] training examples."""
        client, rules, deployment, method = self.client, self.rules, self.deployment, self.deployment.method.strip()
        if rules.methods and method not in rules.methods:
            raise Refused(f"{client} takes part in {', '.join(rules.methods)} only, and the run is of {method}")
        privacy, secure = deployment.run.privacy, deployment.run.secure
        if privacy is not None:
            replace(privacy, strict=privacy.strict or rules.strict).check_method(method, self.algorithm, count)
        if secure is not None:
            secure.averaged_fields(method, self.algorithm)
        elif rules.require_secure_aggregation and self.algorithm.sends:
            raise Refused(f"{client} sends updates in secure sums only; set secure_sum in the run")
        least = rules.min_noise if privacy is None else max(rules.min_noise, privacy.noise or 0.0)
        if not least <= noise < math.inf:  # NaN is neither
            raise Refused(
                f"{client} trains with noise of at least {least:g} only, and the server asks for {noise:g}; nothing "
                "was computed"
            )
        if privacy is None and rules.demands_privacy:
            raise Refused(f"{client} trains with differential privacy only; set dp_noise or dp_epsilon in the run")

    def check_split(self, split: str) -> None:
        """Refuse evaluations on rows that the owner does not name, or that private training uses."""
        client, allowed = self.client, self.rules.evaluate
        if split not in SPLITS:
            raise Refused(f"a split is one of {', '.join(SPLITS)}; the message asks for {split[:20]!r}")
        if split not in allowed:
            raise Refused(f"{client} evaluates models on {', '.join(allowed)} examples only, not on {split}")
        learned_from = split == "train" or (split == "val" and "needs validation" in self.algorithm.traits)
        if self._private and learned_from:
            raise Refused(
                f"{client} evaluates no model on examples that training uses: exact losses on them would tell what the "
                "noise on gradients hides"
            )

    def check_sums(self) -> None:
        client = self.client
        if self.deployment.scaling != STANDARD:
            raise Refused(f"the run does not declare a common scaling, so {client} gives no sums of features")
        if self.rules.require_secure_aggregation:
            raise Refused(f"{client} sends data in secure sums only, and sums of its features would be unmasked")
        if (self._private or self.rules.hides_client) and not self.rules.sums:
            raise Refused(
                f'{client} gives no exact sums of its features, which epsilon would not cover; use scaling = "none" or '
                'a number, or have the owner of the node allow it (sums="yes" in node.toml)'
            )

    def check_search(self) -> None:
        """Refuse a search where the owner wants anything protected: exact figures of all rows, in divisions that the
        server chooses, leave in it, and exact sums of the rows outside of every fold. Their differences are rows. Under
        differential privacy figures get noise, sums are those of all training rows, and all of it has a price."""
        rules, private = self.rules, self.deployment.run.privacy is not None
        if rules.hides_client or rules.require_secure_aggregation or (rules.demands_privacy and not private):
            raise Refused(f"{self.client} gives no exact figures of its rows, which a search chooses by")
        if not private:
            self.check_split("test")

    def hold_plan(self, noise: float, events: Events, figures: Events) -> None:
        """Refuse a search that would cost more than the owner allows before any of it is spent: all that its runs take
        at most, and its figures."""
        rules = self.rules
        if not rules.evaluation_noise:
            raise Refused(f"the owner of {self.client} keeps figures (evaluation_noise = 0), by which a search chooses")
        if math.isinf(rules.epsilon):
            return
        with self.ledger.locked():
            by_noise = dict(self.ledger.read().spent())
        by_noise[rules.evaluation_noise] = merge(by_noise.get(rules.evaluation_noise, ()), figures)
        epsilon = epsilon_with(tuple(by_noise.items()), noise, events, rules.delta)
        if epsilon > rules.epsilon:
            raise Refused(
                f"the owner of {self.client} allows no more than epsilon {rules.epsilon:g} (delta {rules.delta:g}), "
                f"and this search would take it to {epsilon:.3g}; nothing was spent. Take fewer tries, methods, folds "
                "or rounds, or more noise"
            )

    def check_model(self, digest: str, run: str) -> None:
        """Refuse to train a model for a secure sum from which another run has had an update, under whatever server: one
        client that is in one of the two sums alone would stand in their difference."""
        if self._together is not None:
            self._together.models[digest] = run
            return
        with self.ledger.locked():
            self._check_models({digest: run})
            self.ledger.note_models({digest: run})

    def _check_models(self, models: Mapping[str, str]) -> None:
        summed = self.ledger.read().summed
        for digest, run in models.items():
            if (before := summed.get(digest, run)) != run:
                raise Refused(
                    f"{self.client} has trained this model for a secure sum of run {before} already; a client that is "
                    "in one of two such sums alone would stand in their difference. Begin with another seed"
                )

    def check_share(self, share: user_level.Share | None, run: str) -> None:
        """Refuse updates without noise from the nodes where the owner demands it, and sums beyond what the owner and
        the run allow; before anything is computed. `share`: what the client would add to a sum."""
        client, rules, privacy = self.client, self.rules, self.deployment.run.user_privacy
        at_nodes = share is not None and privacy is not None and privacy.at_nodes
        if rules.hides_client and self.algorithm.sends and not at_nodes:
            raise Refused(
                f"{client} sends updates with noise from the nodes only, in secure sums; set user_at_nodes, "
                "user_epsilon and secure_sum in the run"
            )
        if at_nodes:
            assert share is not None
            assert privacy is not None
            if not (privacy.noise or 0.0) <= share.noise < math.inf:  # NaN is neither
                raise Refused(f"the run promises {client} user-level noise {privacy.noise}; got {share.noise:g}")
            with self.ledger.locked():
                self._hold_sum(self.ledger.read(), share.noise, run)

    def enter_sum(self, question: str, run: str, round: int, noise: float) -> None:
        """Book a masked update with noise from the nodes, once: the same one may be asked for again. Hold the lock."""
        page = self.ledger.read()
        if noise and not page.knows(question):
            self._hold_sum(page, noise, run)
            self.ledger.note(self.rules.named(), page.roles)
            self.ledger.enter(Answered(question, run, SUM, round, noise, _ONE_SUM, now()))

    def _hold_sum(self, page: Page, noise: float, run: str) -> None:
        client, rules, privacy = self.client, self.rules, self.deployment.run.user_privacy
        if rules.hides_client:
            spent, who = page.spent(kinds=WHOLE_CLIENT), f"the owner of {client} allows as a whole"
            epsilon = hold(spent, noise, _ONE_SUM, rules.delta, rules.user_epsilon, who)
            self.spent["client"] = epsilon, rules.user_epsilon
        if privacy is not None and privacy.epsilon is not None:
            spent, who = page.spent(run, WHOLE_CLIENT), f"the run promises {client} as a whole"
            hold(spent, noise, _ONE_SUM, privacy.delta, privacy.epsilon, who)

    def check_categories(self, columns: list[str]) -> None:
        """`columns` hold categories, whose names would be sent. Permission to give sums does not cover them."""
        if (self._private or self.rules.hides_client) and columns:
            raise Refused(
                f"{self.client} does not say which categories its columns {', '.join(columns[:5])} hold: no epsilon "
                "covers that. Leave these columns out (features in the run, ignore in node.toml)"
            )

    def check_describe(self, rows: int) -> None:
        client, rules = self.client, self.rules
        if not rules.describe:
            raise Refused(f"the owner of {client} gives no description of its table (describe)")
        if rows < rules.smallest_count:
            raise Refused(f"{client} has fewer rows than the owner describes (smallest_count = {rules.smallest_count})")
        if (rules.hides_client or rules.require_secure_aggregation) and not rules.sums:
            raise Refused(
                f"{client} gives no description, whose means and counts would leave in no secure sum and without the "
                'noise that hides a whole client; the owner of the node may allow it (sums="yes")'
            )

    def check_judged(self, rows: int) -> None:
        """Refuse to judge models that a server brings on a few rows, and where the client is hidden as a whole."""
        client, rules = self.client, self.rules
        if rows < rules.smallest_count:
            raise Refused(f"{client} judges models on {rules.smallest_count} rows at least (smallest_count)")
        if rules.hides_client and not rules.exact_scores:
            raise Refused(f"the owner of {client} keeps figures of evaluations (user_epsilon)")

    # ---- answers with noise, of no training ----

    def at_price(
        self, kind: str, question: Packet, entry: VaultEntry, events: Events, make: Callable[[Noise], Packet], *,
        data: Mapping[str, Any],
    ) -> Released:  # fmt: skip
        """An answer of noised sums [..., n], none of which a row changes by more than one: `make` is given the noise,
        of the owner's deviation in units of √n, and `events` has one release for each of the others. It is priced
        before it is made, and the same question gets the same answer. `data` is what it depends on beside the order."""
        rules, booked = self.rules, SCORES if kind == SCORE else COUNTS
        noise = rules.evaluation_noise
        if not noise:
            raise Refused(f"the owner of {self.client} keeps such figures (evaluation_noise = 0)")
        parts = [kind, question.digest(), dataclasses.asdict(self.settings), data]
        digest = storage.record_digest(parts)
        with self.ledger.locked(), entry.locked():
            page = self.ledger.read()
            if page.knows(digest):
                former = entry.answer(kind, digest)
                if former is None:
                    raise Refused(f"{self.client} has answered this before and no longer has the answer")
                return Released.of(former, "the same figures again")
            for name, rows in (("training", TRAINING_ROWS), ("held-out", HELD_OUT_ROWS)):
                if booked in rows and not math.isinf(rules.epsilon):
                    who = f"the owner of {self.client} allows"
                    epsilon = hold(page.spent(kinds=rows), noise, events, rules.delta, rules.epsilon, who)
                    self.spent[name] = epsilon, rules.epsilon
            self.ledger.note(rules.named(), page.roles)
            self.ledger.enter(Answered(digest, entry.run, booked, 0, noise, events, now()))
            draws = self.vault.secret(self.client).draws(bytes.fromhex(digest), new_nonce())
            answer = make(_noise_of(draws.noise, noise))
            entry.keep_answer(kind, digest, answer)
        return Released.of(answer, f"noise {noise:g}, at a price")

    def locked_if_private(self) -> AbstractContextManager[None]:
        return nullcontext() if self.deployment.run.privacy is None else self.ledger.locked()

    def locked_for_sum(self, kind: str) -> AbstractContextManager[None]:
        """The ledger's lock for a masked update, which may have a price; to be taken before that of the vault's entry,
        as private requests do."""
        return self.ledger.locked() if kind == MASK else nullcontext()


def at_rate(events: Events, rate: float) -> Events:
    """The events with samples that every row joins with this chance at least: they cost no less, and few kinds of
    samples are accounted in a moment."""
    total: Events = ()
    for one in events:
        total = merge(total, (replace(one, q=max(one.q, rate)),))
    return total


def _noise_of(draws: Callable[[Tensor, Tensor], Tensor], noise: float) -> Noise:
    def of(sums: Tensor) -> Tensor:
        deviation = noise * math.sqrt(sums.shape[-1])
        return deviation * draws(torch.zeros(1, dtype=torch.int64), sums.reshape(1, -1))[0].reshape(sums.shape)

    return of


def hold(spent: ByNoise, noise: float, events: Events, delta: float, limit: float, who: str) -> float:
    """Epsilon with these events; `Refused` beyond the limit, in the name of `who` set it."""
    epsilon = epsilon_with(spent, noise, events, delta)
    if epsilon > limit:
        raise Refused(
            f"{who} no more than epsilon {limit:g} (delta {delta:g}), and an answer would take it to {epsilon:g}; "
            "nothing was sent"
        )
    return epsilon


def epsilon_with(spent: ByNoise, noise: float, events: Events, delta: float) -> float:
    """Epsilon of all that was spent together with these events under this noise."""
    from kinfed.privacy import epsilon_over_noises

    by_noise = dict(spent)
    by_noise[noise] = merge(by_noise.get(noise, ()), events)
    return epsilon_over_noises(tuple(sorted(by_noise.items())), delta)


def error_outside(error: Exception, client: str, paths: Mapping[str, str]) -> Exception:
    """An error as the server gets it; `paths`: files that the node's settings name."""
    if not isinstance(error, (*_WITHOUT_EXAMPLES, Withheld)):
        kind = type(error).__name__
        return Withheld(f"{kind} at {client}; its text may quote examples and is in the node's own log")
    text = str(error)
    for name, path in sorted(paths.items(), key=lambda item: -len(item[1])):
        text = text.replace(path, f"({name})")
    error.args = (_PATH.sub("(path)", text),)
    return error
