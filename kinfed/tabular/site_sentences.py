"""The result of a fit in words, for people who do not know federated learning: one plain sentence per site."""

from collections.abc import Sequence

from scipy.special import stdtrit

from kinfed.analysis import MetricStyle, metric_style
from kinfed.report.drawing import byte_size, format_number, listed, plural, shown, signed
from kinfed.tabular.fit_result import ColumnWorth, ContenderRecord, Estimate, FitResult, SiteRecord
from kinfed.tabular.portfolio import ALONE, FINE_TUNED, INTERCEPT, ONE_MODEL, RECALIBRATED
from kinfed.theory import certificates

FEW_ROWS = 30  # test rows below which a figure of a site says little by itself
BEYOND = 0.025  # the chance that a 95 % interval lies on one side of the truth
FEW_OF_A_CLASS = 10  # the same for those of the rarer of two classes
MOST_PARTS = 3  # of a mixture that are named
MOST_CLASSES = 5  # that are named where the target is described
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
    "b": "its model times its weight",
    "bits": "which numbers of its model these are",
    "cluster": "which of the common models it has chosen",
    "core": "the part of its model that the others may use",
    "corners": "the changes of the last layers that it mixes",
    "descriptor": "a few numbers that describe its rows",
    "body": "its share of the change of the network that makes these, but its last layer",
    "top": "its share of the change of the last layer of that network",
    "counts": "how many of its rows lie between which values of every column",
    "covariance": "the covariance of the features of its rows",
    "critical": "which numbers of its model matter to it",
    "embeddings": "the change of a vector for every class",
    "feature": "the mean of the features of its rows",
    "reported": "the number of rows behind that mean",
    "fisher": "how much the model says of its rows",
    "h": "mean features of every class times its share",
    "head": "the last layer of its model",
    "length": "the length of its steps together",
    "losses": "the errors of several models on its training rows",
    "means": "mean features of every class",
    "missing": "the way of rows with gaps at every split of a tree",
    "moments": "weights of its rows, and sums of their targets",
    "norm": "the number of its steps",
    "optimum": "the change of its model towards its own best",
    "policy": "the change of the part that divides features",
    "predictions": "what its model says of the public rows",
    "scores": "what its model says of the public rows",
    "prototypes": "mean features of every class",
    "weight": "the number of its rows of every class",
    "q": "the change of how much it relies on each of the others",
    "ratio": "by how much its update is shortened",
    "split": "where a tree divides its rows",
    "value": "what a tree says in every leaf",
    "columns": "zeros, as many as it has columns",
    "level": "sums of gradients of all of its rows",
    "known": "for which classes it has rows",
    "labels": "the classes of its rows",
    "sums": "sums over its rows of products of columns and target, or of rows between values",
    "valve": "the change of the part that conditions features",
    "variance": "how much the features of its rows vary",
}
HANDED_ON = (
    "The server hands the model on to other sites as it is, so that these, too, could study what it says of the rows "
    "it was trained on."
)


class Wording:
    """Sentences about one result."""

    def __init__(self, result: FitResult) -> None:
        self.result = result
        alone = [site.alone.value for site in result.sites if site.alone.value is not None]
        self.style: MetricStyle = metric_style(result.metric).for_values(alone)
        scores = [one.validation for one in result.contenders]
        self.choice: MetricStyle = metric_style(result.choice_metric or result.metric).for_values(scores)

    # ---- figures ----

    def value(self, estimate: Estimate) -> str:
        """87.2 %, or a dash where it is undefined."""
        return "–" if estimate.value is None else self.number(estimate.value)

    def number(self, value: float) -> str:
        return shown(value, self.style) + self.style.unit

    def gain(self, value: float) -> str:
        """+1.2 points; of errors in their own unit, where positive is less error."""
        return signed(value, self.style) + (" points" if self.style.in_percent else "")

    def interval(self, estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return "too few test rows for an interval"
        return f"95 % interval {signed(estimate.low, self.style)} to {signed(estimate.high, self.style)}"

    def score(self, value: float) -> str:
        """A value of the proper score that choices were made by."""
        return shown(value, self.choice) + self.choice.unit

    def advantage(self, value: float) -> str:
        """An advantage in that score: positive is better."""
        return signed(value, self.choice) + (" points" if self.choice.in_percent else "")

    # ---- sites ----

    def predicted(self) -> str:
        """The target in words: outcome, which is 0 (312 training rows) or 1 (377)."""
        problem, name = self.result.problem, self.result.target or "the target"
        if problem.is_regression:
            figures = f"mean {problem.mean:.3g}, standard deviation {problem.scale:.3g}"
            return f"{name}, a number ({figures} in training rows)"
        if not problem.has_classes:
            return f"{name}: {problem.in_words()}"
        labels = problem.class_labels
        if len(self.result.class_rows) == len(labels) <= MOST_CLASSES:
            counts = (format_number(rows, 0) for rows in self.result.class_rows)
            first, *others = zip(labels, counts, strict=True)
            words = [f"{first[0]} ({first[1]} training rows)", *(f"{label} ({rows})" for label, rows in others)]
        else:
            words = labels[:MOST_CLASSES]
        more = f" or one of {len(labels) - len(words)} others" if len(labels) > len(words) else ""
        return f"{name}, which is {', '.join(words)}{more}" if more else f"{name}, which is {listed(words, 'or')}"

    def rows(self, site: SiteRecord) -> str:
        """31 test rows, 2 of them of class 0."""
        rows = plural(site.test_rows, "test row")
        return f"{rows}, {site.rare_rows} of them of class {site.rare_class}" if self.has_few(site) else rows

    def has_few(self, site: SiteRecord) -> bool:
        """Tell whether few test rows are of the rarer of two classes."""
        return site.rare_rows is not None and site.rare_rows < FEW_OF_A_CLASS

    def title(self, name: str) -> str:
        return self.result.contender(name).title

    def kind_of_model(self, network: str) -> str:
        """The kind of model for people who do not know the names of those that are tried by default."""
        problem = self.result.problem
        linear = "linear regression" if problem.is_regression else "logistic regression"
        linear = linear if problem.is_regression or problem.classifies else "linear model"
        return {"mlr": f"{linear} (mlr)", "mlp": "small neural network (mlp)"}.get(network, network)

    def way(self, name: str) -> str:
        """The words for a contender after "takes"."""
        fixed = {
            ALONE: "the model it trains alone",
            ONE_MODEL: "the one model of all sites",
            FINE_TUNED: "the model of all sites, fine-tuned on its own rows",
            INTERCEPT: "the model of all sites with an intercept of its own",
            RECALIBRATED: "the model of all sites, recalibrated on its own rows",
        }
        return fixed.get(name, f"a model of its own that learns with the others by {self.title(name)}")

    def handed(self, site: SiteRecord) -> str:
        """The words for what a site is handed, after "takes"."""
        shares = site.shares or {site.chosen: 1.0}
        if len(shares) == 1:
            return self.way(next(iter(shares)))
        own = shares.get(ALONE, 0.0)
        ordered = sorted(shares.items(), key=lambda one: -one[1])
        parts = [f"{self.title(name)} {percent(one)}" for name, one in ordered if name != ALONE and one >= 0.005]
        others = f" ({some(parts, MOST_PARTS)})" if parts else ""
        shared = f"{percent(1 - own)} what it learnt with the others{others}"
        return f"{percent(own)} the model it trains alone and {shared}" if own else shared

    def certificate(self, site: SiteRecord) -> str:
        """What the test rows show of the contender that the folds chose; "" if that is learning alone."""
        gain = site.gain_chosen
        if site.chosen == ALONE or gain.value is None:
            return ""
        title, expected = self.title(site.chosen), self.expected(site)
        if gain.at_least is None:
            return f"Not shown: {title} has too few test rows for a bound. {expected}"
        about = " about" if self.style.name != "accuracy" and site.test_rows < certificates.FEW else ""
        if gain.is_shown:
            return f"Shown (95 %): {title} by itself gains{about} {self.gain(gain.at_least)} or more. {expected}"
        return (
            f"Not shown: {title} by itself gains {self.gain(gain.value)} on these rows, lower bound{about} "
            f"{signed(gain.at_least, self.style)}. {expected}"
        )

    def expected(self, site: SiteRecord) -> str:
        """The gain to expect of what the folds chose, which is never called shown."""
        gain = site.expected_gain
        if gain.value is None or gain.low is None or gain.high is None:
            return ""
        ends = f"{signed(gain.low, self.choice)} to {signed(gain.high, self.choice)}"
        value = f"{self.advantage(gain.value)} in {self.choice.noun} ({ends})"
        return f"Expected from all rows of all sites: a gain of {value}."

    def drift(self) -> str:
        """What validation rows had promised too much; "" if they had not."""
        if self.result.drift >= 0:
            return ""
        return (
            f"Here the test rows of all sites together lower it by {self.advantage(-self.result.drift).lstrip('+')} in "
            f"{self.choice.noun}: figures called expected have that taken off."
        )

    def promise(self, site: SiteRecord) -> str:
        """What the mixture may cost; "" if nothing is promised."""
        if site.most_it_costs is None or len(site.shares) < 2:
            return ""
        nats = f"at most {site.most_it_costs:.3f} nats of log loss against its own model"
        if self.result.problem.is_regression:
            nats += ", of normal densities"
        return f"On average over rows like these, this costs {nats}; for {self.style.noun} nothing is promised."

    def sets(self, site: SiteRecord) -> str:
        """Prediction sets of a site, and how they covered."""
        if site.set_size is None or site.covered is None:
            return ""
        size = f"are {self.number(site.set_size)} wide" if self.result.problem.is_regression else (
            f"hold {site.set_size:.2f} classes on average"
        )  # fmt: skip
        return f"Sets of 90 % {size} and held the truth in {percent(site.covered)} of {plural(site.set_rows, 'row')}."

    def calibration(self, site: SiteRecord) -> str:
        """How near what the model of a site says is to what is true on average; "" with too few rows."""
        one, problem = site.calibration, self.result.problem
        if one is None or one.gap.value is None or one.gap.low is None or one.gap.high is None:
            return ""
        if problem.is_regression:
            differs = f"{one.gap.value:+.3g} ({one.gap.low:+.3g} to {one.gap.high:+.3g})".replace("-", "−")
            return f"It predicts {one.predicted:.4g} on average, and the truth differs by {differs}."
        ends = f"{100 * one.gap.low:+.0f} to {100 * one.gap.high:+.0f} points".replace("-", "−")
        true = percent(one.predicted + one.gap.value)
        if len(problem.class_labels) > 2:
            return f"It is {percent(one.predicted)} sure on average and right in {true} (difference {ends})."
        name = problem.class_labels[1]
        return f"It gives class {name} {percent(one.predicted)} on average, and {true} are of it (difference {ends})."

    def insurance(self) -> str:
        """What safe mixtures cost and saved beside what the folds chose; "" if none were made."""
        pairs = [(one.gain.value, one.gain_chosen.value) for one in self.result.sites
                 if one.gain.value is not None and one.gain_chosen.value is not None]  # fmt: skip
        if self.result.deploy != "safe" or not pairs:
            return ""
        handed, chosen = ([pair[place] for pair in pairs] for place in (0, 1))
        means = [self.gain(sum(values) / len(values)) for values in (handed, chosen)]
        worst = [self.gain(min(values)) for values in (handed, chosen)]
        return (
            f"Mixtures are insurance: on test rows they gain {means[0]} on average over sites, where what the folds "
            f"chose would gain {means[1]}; at the site that fares worst it is {worst[0]} against {worst[1]}."
        )

    def sentence(self, site: SiteRecord) -> str:
        """One sentence on what the site has alone, what it takes, and what that gains on its test rows."""
        takes, rows = f"{site.site} takes {self.handed(site)}", self.rows(site)
        if not site.test_rows:
            return f"{takes}; it has no test rows, so that nothing can be said of its gain."
        if self.result.apart == "consortium":
            return self._sentence_apart(site, takes, rows)
        if site.alone.value is None or site.deployed.value is None:
            return f"{takes}; {self._undefined(site)}."
        alone = f"{self.style.noun} {self.value(site.alone)}"
        if (site.shares or {site.chosen: 1.0}).keys() == {ALONE}:
            return f"{takes} ({alone}, {rows}): {self._no_better(site)}."
        return (
            f"{takes}: {alone} alone, {self.value(site.deployed)} with it; {self._verdict(site.gain)} "
            f"(gain {self.gain(site.gain.value or 0.0)}, {self.interval(site.gain)}, {rows})."
        )

    def _sentence_apart(self, site: SiteRecord, takes: str, rows: str) -> str:
        """The same of a site that keeps its figures and says what it gains."""
        if site.gain.value is None:
            return f"{takes}; on its {rows} nothing can be said of its gain."
        if site.shares.keys() == {ALONE}:
            return f"{takes} ({rows}): {self._no_better(site)}."
        gain = f"gain {self.gain(site.gain.value)}, {self.interval(site.gain)}, {rows}"
        return f"{takes}; {self._verdict(site.gain)} ({gain})."

    def _undefined(self, site: SiteRecord) -> str:
        """The reason why the metric has no value at the site."""
        rows = plural(site.test_rows, "test row")
        if self.result.known_metric.by_class and site.rare_rows == 0:
            verb = "is" if site.test_rows == 1 else "are all"
            only = next(label for label in self.result.problem.class_labels if label != site.rare_class)
            return (
                f"{self.style.noun} compares rows of both classes, and its {rows} {verb} of class {only}, so that "
                "nothing can be said of its gain"
            )
        return f"{self.style.noun} is undefined on its {rows}, so that nothing can be said of its gain"

    def _no_better(self, site: SiteRecord) -> str:
        if site.together is None:
            return "there is no other site to learn with"
        if site.chosen != ALONE:
            return "test rows do not show that what the folds chose is better"
        best = "by validation rows nothing that learns with the others was better"
        if self.result.apart == "consortium":
            return best
        has = f"({self.title(site.together)}) has {self.value(site.with_others)} on the test rows"
        return f"{best}; the best of these {has}"

    def _verdict(self, gain: Estimate) -> str:
        if gain.value is None or gain.low is None:
            return "whether that is more than chance cannot be told"
        if gain.is_clear:
            return "a clear gain" if gain.value > 0 else "clearly worse than alone"
        return "the difference is within chance"

    def why(self, site: SiteRecord) -> str:
        """The reason of the choice."""
        own = plural(site.validated_rows, "validation row")
        if site.chosen == ALONE:
            if site.together is None:
                return "With one site there is nothing to choose."
            return (
                f"By its own {own} and those of the other sites, the best that learns with others "
                f"({self.title(site.together)}) was expected to gain {self.advantage(site.expected_together)} in "
                f"{self.choice.noun}."
            )
        return (
            f"By its own {own} and those of the other sites, {self.title(site.chosen)} was expected to gain "
            f"{self.advantage(site.expected)} in {self.choice.noun} over learning alone, more than all others."
        )

    def leaves(self, contender: ContenderRecord) -> str:
        """All that would leave a site that takes this, where sites really train apart."""
        once = (
            f"Once, {byte_size(self.result.statistics_bytes)} of sums, counts and names of categories of its columns"
            if self.result.statistics_bytes
            else "Nothing before the first round"
        )
        if contender.name == ALONE:
            return f"{once}; then nothing."
        sent = listed([self.sent(name) for name in contender.sends])
        rounds = self.result.settings["rounds"]
        message = f"{once}; then {byte_size(contender.bytes_up)} in each of {rounds} rounds: {sent}. Never a row."
        return f"{message} {HANDED_ON}" if contender.hands_on else message

    @staticmethod
    def sent(field: str) -> str:
        """The field of a message in words."""
        return SENT.get(field, f"“{field}”")

    @property
    def kept_at_home(self) -> tuple[str, ...]:
        """Columns of figures that sites keep if they have not shown their rows."""
        return "Alone", "Takes", "One for all", self.baseline

    @property
    def baseline(self) -> str:
        """The baseline, which takes no model, as the head of a column."""
        return self.result.baseline.capitalize()

    def no_model(self, site: SiteRecord) -> bool:
        """Tell whether the model of the site does no better on its test rows than its baseline."""
        if site.deployed.value is None or site.baseline.value is None:
            return False
        sign = -1 if self.style.lower_is_better else 1
        return sign * site.deployed.value <= sign * site.baseline.value

    # ---- columns that not every site has ----

    def own_columns(self) -> list[tuple[str, str]]:
        """Every such column, and who has it, who lacks it, and what it buys where it is."""
        columns = dict.fromkeys(one.column for one in self.result.own_columns)
        return [(name, self._own([one for one in self.result.own_columns if one.column == name])) for name in columns]

    def _own(self, column: Sequence[ColumnWorth]) -> str:
        has = [one for one in column if one.gain is not None]
        without, few = [one.site for one in column if not one.held], "too few rows tell what it buys"
        if self.result.apart == "site":
            unknown = f"The site has it, and {few}." if column[0].held else "The site lacks it."
            return f"The site {self._buys(has[0])}." if has else unknown
        sentences = [f"{some(without)} {'lacks' if len(without) == 1 else 'lack'} it."] if without else []
        sentences += [f"{one.site} {self._buys(one)}." for one in has]
        sentences += [f"{one.site} has it, and {few}." for one in column if one.held and one.gain is None]
        if without and len(has) == 1:
            sentences.append("What it would buy elsewhere one site cannot tell.")
        elif without and has:
            mean, reach = self._mean_worth(has)
            low, high = mean - reach, mean + reach
            what = f"it would buy about {self.worth(mean)}" if low > 0 else "no use is to be expected"
            ends = f"95 % interval {self.worth(low)} to {self.worth(high)}"
            sentences.append(f"Where it is lacking {what} (the mean of those who have it, {ends}).")
        return " ".join(sentences)

    def _buys(self, one: ColumnWorth) -> str:
        """has it and it lowers the log loss by 0.063 (95 % interval 0.021 to 0.106)"""
        gain, error = one.gain or 0.0, one.error or 0.0
        low, high = gain - 1.96 * error, gain + 1.96 * error
        if low > 0:
            return f"has it, and it buys {self.worth(gain)} (95 % interval {self.worth(low)} to {self.worth(high)})"
        return f"has it, and no use of it is seen (95 % interval {self.worth(low)} to {self.worth(high)})"

    @staticmethod
    def _mean_worth(has: Sequence[ColumnWorth]) -> tuple[float, float]:
        """The mean gain over sites, each alike, and half of its 95 % interval: by how few sites differ (Student's t) or
        by their errors, whichever is larger."""
        gains, errors = ([getattr(one, name) or 0.0 for one in has] for name in ("gain", "error"))
        mean, count = sum(gains) / len(gains), len(gains)
        between = sum((gain - mean) ** 2 for gain in gains) / (count - 1) / count
        within = sum(error**2 for error in errors) / count**2
        return mean, max(float(stdtrit(count - 1, 0.975)) * between**0.5, 1.96 * within**0.5)

    def worth(self, gain: float) -> str:
        """A gain in the loss that effects are learnt by: squared errors are parts of the target's variance."""
        figure = f"{gain:.3f}" if self.result.problem.classifies else f"{100 * gain:.1f} %"
        return figure.replace("-", "−")

    # ---- all sites ----

    def newcomer(self) -> str:
        """Advice to a new site."""
        name = self.result.newcomer
        if len(self.result.sites) == 1:
            return ""
        if name == ALONE:
            return "If it has labelled rows, it should train alone: by validation rows, that is best for these sites."
        if name == ONE_MODEL:
            return "That is also what serves these sites best on average, by their validation rows."
        return f"If it has labelled rows, it can train its own model as works best here on average, {self.title(name)}:"

    def overall(self) -> str:
        sites, gain = self.result.sites, self.result.overall
        moved = [site for site in sites if (site.shares or {site.chosen: 1.0}).keys() != {ALONE}]
        if self.result.apart == "site":
            return f"This page is of {sites[0].site} alone and has not left it; of the other sites it knows nothing."
        if len(sites) == 1:
            return "There is only one site, so there is no other to learn with: it uses the best of its own models."
        if not moved:
            return f"All {len(sites)} sites are best served alone, by their validation rows."
        head = f"{len(moved)} of {len(sites)} sites take a model that learns with the others"
        if gain.value is None:
            return f"{head}; what they gain cannot be told from their test rows."
        by_rows = self.result.overall_by_rows.value
        rows = "" if by_rows is None else f" Every row alike, it is {self.gain(by_rows)}."
        return f"{head}; {self._clear_sites(moved)}. {self._mean(gain)}{rows}{self._mean_by_choice()}"

    def _mean_by_choice(self) -> str:
        """The mean gain in the score that chose, where that is another than the reported one."""
        gain = self.result.overall_by_choice
        if gain.value is None or gain.low is None or gain.high is None:
            return ""
        ends = f"{signed(gain.low, self.choice)} to {signed(gain.high, self.choice)}"
        return f" In {self.choice.noun}, by which models were chosen, it is {self.advantage(gain.value)} ({ends})."

    def references(self) -> str:
        """The usual alternatives, in one sentence; "" if they were not fitted."""
        parts = [
            f"{one.title} {self.number(one.value)}{' (needs pooled rows)' if one.pooled else ''}"
            for one in self.result.references
            if one.value is not None
        ]
        handed = [site.deployed.value for site in self.result.sites if site.deployed.value is not None]
        if not parts or not handed:
            return ""
        mean = self.number(sum(handed) / len(handed))
        figures = f"{self.style.noun}, mean over sites"
        return f"The usual alternatives ({figures}): {', '.join(parts)}; here it is {mean}."

    def _clear_sites(self, moved: Sequence[SiteRecord]) -> str:
        """The sites whose gain, or loss, is beyond chance; of many sites some are by chance."""
        better, worse = ([one.site for one in moved if one.gain.is_clear and sign * (one.gain.value or 0) > 0]
                         for sign in (1, -1))  # fmt: skip
        if not better and not worse:
            return "at no single site is the difference beyond chance"
        proof = f"the gain is clear at {len(better)}" + (f" ({some(better, 5)})" if better else "")
        proof += f", and {len(worse)} are clearly worse off ({some(worse, 5)})" if worse else ""
        expected = round(BEYOND * len(moved))
        return f"{proof}; by chance alone, about {expected} on either side would look clear" if expected else proof

    def _mean(self, gain: Estimate) -> str:
        """The mean gain over sites, and what follows from it."""
        less = f" (less {self.style.noun})" if self.style.lower_is_better else f" in {self.style.noun}"
        figure = f"The mean gain over sites{less} is {self.gain(gain.value or 0.0)}, {self.interval(gain)}"
        if not gain.is_clear:
            return (
                f"{figure}: these rows do not show that learning with the others helps, nor that it harms; more rows "
                "would tell."
            )
        if (gain.value or 0.0) > 0:
            return f"{figure}: on average, learning with the others helps."
        return f"{figure}: on average, sites do better alone, although their validation rows suggested otherwise."


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
