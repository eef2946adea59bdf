"""Messages of every site in words, the guarantee that they were under, and against whom it holds."""

from __future__ import annotations

from typing import Any

from kinfed.dossier.facts import APART, FIT, SEARCH
from kinfed.dossier.sections import DossierSection, columns
from kinfed.dossier.threats import NOT_PROTECTED, THREATS
from kinfed.report import TextTable
from kinfed.report.drawing import byte_size, listed, plural
from kinfed.tabular import Wording

Facts = dict[str, Any]
KINDS = {  # of messages, as audit logs call them
    "hello": "greeting", "sums": "statistics of columns", "train": "update", "evaluate": "figures of an evaluation",
    "judge": "figures of tries", "weigh": "advantages of tries",
    "settle": "what the site takes, its gain, and what own columns buy",
    "together": "answers of several runs at once", "share": "shares for a secure sum", "mask": "masked update",
    "confirm": "confirmation of a secure sum", "unmask": "shares of masks",
}  # fmt: skip


def leaving(facts: Facts) -> DossierSection:
    apart, sites = facts["kind"] in APART, len(facts["sites"])
    verb = "sent" if apart else "would have sent"
    texts = []
    if apart:
        shape = f", the shape of an example ({' × '.join(map(str, facts['example']))})" if facts["example"] else ""
        texts.append(
            "Once, when it appeared, each site sent its name, its numbers of training, validation and test rows"
            f"{', names of columns' if facts['columns'] else ''}{shape} and its public key."
        )
    if facts["statistics"]:
        texts.append(
            f"Before the first round each site {verb} statistics of its columns (sums, counts and names of "
            f"categories): {byte_size(facts['statistics'] / max(sites, 1))} on average."
        )
    texts += [sentence for method in facts["methods"] for sentence in _sentences(method, verb, facts["kind"])]
    if (search := facts["search"]) is not None:
        own = dict.fromkeys(one["column"] for one in facts["fit"]["own_columns"])
        bought = f"; and of {listed(list(own))} whether it has the column, and what that buys there" if own else ""
        texts.append(
            f"The search trained {plural(search['runs'], 'run')} (tries, folds and all rows) in "
            f"{plural(search['rounds'], 'round')}; over all of them sites sent {byte_size(search['bytes_up'])} and "
            f"received {byte_size(search['bytes_down'])}. Besides, for every try two numbers (its score on the site's "
            "validation rows and how many these are), for every method its advantage over learning alone with the "
            f"covariance of these, and at the end the gain on its test rows{bought}."
        )
    if (judged := facts["evaluations"]) is not None:
        texts.append(
            f"For evaluations sites sent {byte_size(judged['bytes_up'])} in all: sums of scores over their rows, and "
            f"the method's figures of each site; they received {byte_size(judged['bytes_down'])}."
        )
    tables = [("Fields of a site's message in a round.", _field_table(facts))] if facts["methods"] else []
    if (calls := _call_table(facts)) is not None:
        tables.append(
            ("How often each site was asked for an update, by the schedule that follows from the seed.", calls)
        )
    if facts["transfers"] is not None:
        texts += _log_sentences(facts["transfers"])
        tables.append(("Messages that came from each site, by the server's audit log.", _transfer_table(facts)))
    for client, page in facts["ledgers"].items():
        texts.append(_ledger_sentence(client, page))
        if page["runs"]:
            tables.append((f"What left {client} without a price, by its own ledger.", _released(page)))
    return DossierSection("leaving", "What left each site", texts, tables)


def _sentences(method: Facts, verb: str, kind: str) -> list[str]:
    if not method["fields"]:
        return [f"{method['label']}: nothing; each site learns alone."]
    fields = listed([Wording.sent(field["name"]) for field in method["fields"]])
    over = f" over {plural(method['seeds'], 'seed')}" if method["seeds"] > 1 else ""
    how_often = f"in every round that it was called in, of {plural(method['rounds'], 'round')} in all"
    text = f"{method['label']}: {how_often}, a site {verb} {fields}, {byte_size(method['bytes_of_one'])} each time"
    total = f"; {plural(method['answers'], 'update')}{over}, {byte_size(method['bytes_up'])} in all."
    whole = {FIT: ".", SEARCH: ", and as much in every other run of the search."}  # whose totals stand below
    sentences = [text + whole.get(kind, total)]
    if method["lost"]:
        sentences[-1] += f" {plural(method['lost'], 'update')} more did not count: lost, late or refused."
    if method["as_declared"] is True:
        sentences[-1] += " That is what the method declares that it sends, byte for byte."
    elif method["as_declared"] is False:
        sentences[-1] += " That is not the size that the method declares; ask the person who ran it why."
    if method["hands_on"]:
        sentences[-1] += " The server hands models of sites on to other sites as they are."
    return sentences


def _field_table(facts: Facts) -> TextTable:
    fields = [(method["label"], field) for method in facts["methods"] for field in method["fields"]]
    sizes = ("numbers", "bytes") if any(field["bytes"] is not None for _, field in fields) else ()
    rows = [
        [label, field["name"], Wording.sent(field["name"]),
         *("–" if field[what] is None else f"{field[what]:,}" for what in sizes)]
        for label, field in fields
    ]  # fmt: skip
    heads = ("Method", "Field", "What it is", *(what.capitalize() for what in sizes))
    return TextTable.of("Fields", columns(*heads, texts=heads[1:3]), rows)


def _call_table(facts: Facts) -> TextTable | None:
    known = [method for method in facts["methods"] if method["calls"] and method["fields"]]
    if not known:
        return None
    rows = [[one["name"], *(f"{method['calls'][one['name']]:,}" for method in known)] for one in facts["sites"]]
    return TextTable.of("Calls", columns("Site", *(method["label"] for method in known)), rows)


def _log_sentences(transfers: Facts) -> list[str]:
    """Sentences on the audit logs of the server and the nodes, and whether they agree."""
    sentences = [
        f"The server's audit log, {transfers['head'].partition(':')[0]} lines of which each names the digest of the "
        "one before, is whole."
    ]
    for client, log in transfers["nodes"].items():
        lines = plural(int(log["head"].partition(":")[0]), "line")
        sentences.append(f"The own audit log of {client}, {lines}, is whole, " + (
            "and has every message that came from there." if not log["lacks"] else
            f"and lacks {plural(log['lacks'], 'message')} that the server says came from there: ask both."
        ))  # fmt: skip
    return sentences


def _transfer_table(facts: Facts) -> TextTable:
    sites = facts["transfers"]["sites"]
    rows = [
        [site, KINDS.get(kind, kind), f"{one['messages']:,}", f"{one['bytes']:,}"]
        for site in sorted(sites) for kind, one in sorted(sites[site].items())
    ]  # fmt: skip
    return TextTable.of("Messages", columns("Site", "What", "Messages", "Bytes", texts=["What"]), rows)


def _released(page: Facts) -> TextTable:
    rows = [[run, rule, f"{times:,}"] for run, rules in page["runs"].items() for rule, times in rules.items()]
    what = "What, by which rule"
    return TextTable.of("Ledger", columns("Run", what, "Times", texts=[what]), rows)


def _ledger_sentence(client: str, page: Facts) -> str:
    rules = ", ".join(f"{name} {value}" for name, value in page["rules"].items())
    spent = listed([f"{_epsilon(value)} of {name}" for name, value in page["epsilon"].items() if value != 0.0])
    cost = f"their cost so far is {spent}" if spent else "nothing has been spent"
    return (
        f"By the own ledger of {client}, over all runs and servers, {plural(page['priced'], 'answer')} had a price "
        f"in ε; {cost}. Its owner's rules: {rules or 'none'}."
    )


def _epsilon(value: float | None) -> str:
    return "ε without bound" if value is None else f"ε {value:.4g}"


def guarantees(facts: Facts) -> DossierSection:
    apart = facts["kind"] in APART
    texts = [] if apart else [
        "A computation in one place protects no one from the person who runs it. What follows is what would hold if "
        "sites ran the same apart."
    ]  # fmt: skip
    by_mode: dict[str, list[str]] = {}
    for method in facts["methods"]:
        if method["guarantee"]["mode"] is not None:
            by_mode.setdefault(method["guarantee"]["mode"], []).append(method["label"])
    for mode, labels in by_mode.items():
        threat = THREATS[mode]
        texts.append(
            f"{', '.join(dict.fromkeys(labels))}: the mode is {threat.mode}. What the server learns of a site: "
            f"{threat.learns}. What the site trusts: {threat.trusts}."
        )
    if any(method["guarantee"].get("in_ledgers") for method in facts["methods"]):
        texts.append("What the whole search has cost each site in ε is in the site's own ledger (--vault).")
    for method in facts["methods"]:
        texts += _promises(method)
    if not by_mode:
        texts.append("No method sends anything in rounds, so that nothing needs a guarantee.")
    texts.append(f"Not protected in any mode: {'; '.join(NOT_PROTECTED)}. The whole list is kinfed's threat model.")
    each = _epsilon_table(facts)
    tables = [] if each is None else [("ε of every site: the largest over the seeds.", each)]
    return DossierSection("guarantees", "Under which guarantee, and against whom", texts, tables)


def _promises(method: Facts) -> list[str]:
    """ε in words, of examples and of whole sites."""
    own, sentences = method["guarantee"], []
    if (examples := own.get("examples")) is not None:
        largest = [value for value in examples["epsilon"].values()]
        most = None if None in largest else max(largest)
        sentence = (
            f"{method['label']}: a single training row is hidden by noise {examples['noise']:.4g} times the clipping "
            f"norm {examples['clip']:g}; "
            + ("no ε holds, as there is no noise" if most is None else f"no site's ε exceeds {most:.4g}")
            + f" at δ = {examples['delta']:g}."
        )
        if examples["not_covered"]:
            sentence += f" Not covered: {'; '.join(examples['not_covered'])}."
        if examples["refused"]:
            sentence += f" Stopped early to stay within the budget: {', '.join(examples['refused'])}."
        sentences.append(sentence)
    if (users := own.get("users")) is not None:
        bound = "no ε holds" if users["epsilon"] is None else f"ε is {users['epsilon']:.4g}"
        who = "nodes add the noise inside secure sums" if users.get("at_nodes") else "the server adds the noise"
        sentences.append(
            f"{method['label']}: a whole site is hidden in the server's models; {bound} at δ = {users['delta']:g}, and "
            f"{who}. Personal models and figures are not covered."
        )
    if own.get("secure_least"):
        sentences.append(
            f"{method['label']}: no update leaves a site but masked, in a sum of at least {own['secure_least']} sites."
        )
    return sentences


def _epsilon_table(facts: Facts) -> TextTable | None:
    known = [method for method in facts["methods"] if method["guarantee"].get("examples") is not None]
    if not known:
        return None
    rows = [
        [one["name"], *(_bare(method["guarantee"]["examples"]["epsilon"].get(one["name"])) for method in known)]
        for one in facts["sites"]
    ]
    return TextTable.of("Epsilon", columns("Site", *(method["label"] for method in known)), rows)


def _bare(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4g}"
