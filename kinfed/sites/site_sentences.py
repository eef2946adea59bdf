"""The result of a fit in words, for people who do not know federated learning: one plain sentence per site."""

from __future__ import annotations

from collections.abc import Sequence

from kinfed.report.formats import format_number, plural
from kinfed.report.metric_style import MetricStyle, metric_style
from kinfed.sites.fit_result import ContenderRecord, Estimate, FitResult, SiteRecord
from kinfed.sites.portfolio import ALONE, FINE_TUNED, ONE_MODEL

FEW_ROWS = 30  # test rows below which a figure of a site says little by itself
BEYOND = 0.025  # the chance that a 95 % interval lies on one side of the truth
FEW_OF_A_CLASS = 10  # the same for those of the rarer of two classes
SENT = {
    "delta": "the change of its model",
    "theta": "its model",
    "omega": "its model",
    "w": "how much it trusts the models of others",
    "s": "how sure it is of its model",
    "count": "the number of its training rows",
    "sketch": "256 numbers that say in which direction its own model went",
    "trial": "how well the model it was sent fits its validation rows",
    "pi": "how much it relies on its own and on the common model",
    "loss": "the errors of these on its validation rows",
    "examples": "the number of those rows",
}
HANDED_ON = (
    "The server hands the model on to other sites as it is, so that these, too, could study what it says of the rows "
    "it was trained on."
)


class Wording:
    """Sentences about one result."""

    def __init__(self, result: FitResult) -> None:
        self.result = result
        self.style: MetricStyle = metric_style(result.metric)

    # ---- figures ----

    def value(self, estimate: Estimate) -> str:
        """87.2 %, or a dash where it is undefined."""
        return "–" if estimate.value is None else self.number(estimate.value)

    def number(self, value: float) -> str:
        return format_number(self.style.scale * value, self.style.digits) + self.style.unit

    def gain(self, value: float) -> str:
        """+1.2 points; of errors in their own unit, where positive is less error."""
        shown = format_number(self.style.scale * value, self.style.digits)
        sign = "+" if value > 0 else ""
        return f"{sign}{shown}" + (" points" if self.style.unit else "")

    def interval(self, estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return "too few test rows for an interval"
        low, high = (
            ("+" if end > 0 else "") + format_number(self.style.scale * end, self.style.digits)
            for end in (estimate.low, estimate.high)
        )
        return f"95 % interval {low} to {high}"

    # ---- sites ----

    def predicted(self) -> str:
        """What is predicted: target (0 or 1)."""
        problem, name = self.result.problem, self.result.target
        classes = " or ".join(problem.class_labels[:5]) + (", ..." if problem.num_classes > 5 else "")
        values = problem.in_words() if problem.is_regression else classes
        return f"{name} ({values})" if name else values

    def rows(self, site: SiteRecord) -> str:
        """31 test rows, 2 of the rarer class."""
        rows = plural(site.test_rows, "test row")
        few = site.rare_rows is not None and site.rare_rows < FEW_OF_A_CLASS
        return f"{rows}, {site.rare_rows} of the rarer class" if few else rows

    def title(self, name: str) -> str:
        return self.result.contender(name).title

    def way(self, name: str) -> str:
        """What a site takes, after "takes"."""
        fixed = {
            ALONE: "the model it trains alone",
            ONE_MODEL: "the one model of all sites",
            FINE_TUNED: "the model of all sites, fine-tuned on its own rows",
        }
        return fixed.get(name, f"a model of its own that learns with the others by {self.title(name)}")

    def sentence(self, site: SiteRecord) -> str:
        """What the site has alone, what it takes, and what that gains on its test rows."""
        takes = f"{site.site} takes {self.way(site.chosen)}"
        rows = self.rows(site)
        if not site.test_rows:
            return f"{takes}; it has no test rows, so that nothing can be said of its gain."
        if site.alone.value is None or site.deployed.value is None:
            return f"{takes}; {self.style.noun} cannot be told from its {rows}."
        alone = f"{self.style.noun} {self.value(site.alone)} alone"
        if site.chosen == ALONE:
            return f"{takes} ({alone}, {rows}): {self._no_better(site)}."
        return (
            f"{takes}: {alone}, {self.value(site.deployed)} with it; {self._verdict(site.gain)} "
            f"({self.gain(site.gain.value or 0.0)}, {self.interval(site.gain)}, {rows})."
        )

    def _no_better(self, site: SiteRecord) -> str:
        if site.together is None:
            return "there is no other site to learn with"
        return (
            f"nothing that learns with the others was better on its validation rows; {self.title(site.together)} has "
            f"{self.value(site.with_others)} on the test rows"
        )

    def _verdict(self, gain: Estimate) -> str:
        if gain.value is None or gain.low is None:
            return "a gain cannot be judged"
        if gain.is_clear:
            return "a clear gain" if gain.value > 0 else "clearly worse than alone"
        return "the difference is within chance"

    def why(self, site: SiteRecord) -> str:
        """Why that was chosen."""
        own = plural(site.validated_rows, "validation row")
        if site.chosen == ALONE:
            if site.together is None:
                return "With one site there is nothing to choose."
            change = f"change {self.style.noun} by {self.gain(site.expected_together)}"
            return (
                f"By its own {own} and those of the other sites, the best that learns with others "
                f"({self.title(site.together)}) was expected to {change}."
            )
        return (
            f"By its own {own} and those of the other sites it was expected to gain {self.gain(site.expected)} over "
            f"learning alone, more than all others that were tried."
        )

    def leaves(self, contender: ContenderRecord) -> str:
        """What would leave a site that takes this, where sites really train apart."""
        once = (
            f"Once, {size(self.result.statistics_bytes)} of sums, counts and names of categories of its columns"
            if self.result.statistics_bytes
            else "Nothing before the first round"
        )
        if contender.name == ALONE:
            return f"{once}; then nothing."
        sent = listed([SENT.get(name, f"“{name}”") for name in contender.sends])
        rounds = self.result.settings["rounds"]
        message = f"{once}; then {size(contender.bytes_up)} in each of {rounds} rounds: {sent}. Never a row."
        return f"{message} {HANDED_ON}" if contender.hands_on else message

    @property
    def baseline(self) -> str:
        """What a site reaches without a model, as the head of a column."""
        return self.result.baseline.capitalize()

    def no_model(self, site: SiteRecord) -> bool:
        """Whether what the site takes does no better on its test rows than its baseline."""
        if site.deployed.value is None or site.baseline.value is None:
            return False
        sign = -1 if self.style.lower_is_better else 1
        return sign * site.deployed.value <= sign * site.baseline.value

    # ---- all sites ----

    def newcomer(self) -> str:
        """For a site that was not there."""
        name = self.result.newcomer
        if len(self.result.sites) == 1:
            return ""
        if name == ALONE:
            return "With labelled rows of its own it does best alone, by what validation rows say of these sites."
        if name == ONE_MODEL:
            return "That is also what serves these sites best on average, by their validation rows."
        return f"With labelled rows of its own it gets one by what serves these best on average, {self.title(name)}:"

    def overall(self) -> str:
        sites, gain = self.result.sites, self.result.overall
        moved = [site for site in sites if site.chosen != ALONE]
        if len(sites) == 1:
            return "There is one site, so that there is nobody to learn with: it has the best of its own models."
        if not moved:
            return f"All {len(sites)} sites are best served alone, by their validation rows."
        head = f"{len(moved)} of {len(sites)} sites take a model that learns with the others"
        if gain.value is None:
            return f"{head}; what they gain cannot be told from their test rows."
        mean = f"On average over sites {self.style.noun} changes by {self._mean(gain)}."
        return f"{head}; {self._clear_sites(moved)}. {mean}"

    def _clear_sites(self, moved: Sequence[SiteRecord]) -> str:
        """Where the gain, or the loss, is beyond chance; of many sites some are by chance."""
        better, worse = ([one.site for one in moved if one.gain.is_clear and sign * (one.gain.value or 0) > 0]
                         for sign in (1, -1))  # fmt: skip
        if not better and not worse:
            return "at no single site is the difference beyond chance"
        proof = f"the gain is clear at {len(better)}" + (f" ({some(better, 5)})" if better else "")
        proof += f", and {len(worse)} are clearly worse off ({some(worse, 5)})" if worse else ""
        expected = round(BEYOND * len(moved))
        return f"{proof}; of so many sites about {expected} on either side look so by chance" if expected else proof

    def _mean(self, gain: Estimate) -> str:
        better = "" if self.style.unit or not self.style.lower_is_better else " (positive: less error)"
        return f"{self.gain(gain.value or 0.0)}{better}, {self.interval(gain)}"


def some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def listed(things: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([*([", ".join(things[:-1])] if len(things) > 1 else []), *things[-1:]])


def size(count: int) -> str:
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1e3:.3g} kB" if count < 1e6 else f"{count / 1e6:.3g} MB"
