"""The page of a fit, fit.html: for people who have a table and no interest in federated learning."""

import math
from pathlib import Path

from markupsafe import Markup

from kinfed.report import TableCell, TableColumn, TextTable, render
from kinfed.report import write_page as write_file
from kinfed.tabular.fit_result import PAGE, RUNS, Calibration, FitResult, SiteRecord, server_path, site_path
from kinfed.tabular.portfolio import ALONE, ONE_MODEL
from kinfed.tabular.site_sentences import FEW_OF_A_CLASS, FEW_ROWS, Wording, percent, some
from kinfed.version import __version__

PICTURE, MARGIN = 150, 8  # pixels of a small drawing


def write_page(result: FitResult, folder: Path) -> Path:
    return write_file(folder / PAGE, page(result, folder))


def page(result: FitResult, folder: Path) -> str:
    words, table = Wording(result), short_name(result.table)
    heading = _heading(result)
    command = "kinfed deploy fit" if result.apart else "kinfed fit"
    sites = "The site" if result.apart == "site" else "Every site"
    chosen = [one for one in result.contenders if takers(result, one.name)]
    return render(
        "fit.html", package="kinfed.tabular", title=f"{heading} – {table}", kicker=f"{command} · {table}",
        heading=heading,
        links=[("sites", sites), ("leaves", "What leaves a site"), ("how", "How it was chosen"),
               ("models", "Use the models"), ("words", "Words")],
        footer=[f"kinfed {__version__} · seed {result.settings['seed']} · settings and all figures: fit.json"],
        figures=False, overall=words.overall(), predicted=words.predicted(), metric=words.style.noun,
        metric_title=words.style.noun[0].upper() + words.style.noun[1:],
        definition=result.known_metric.definition.replace("client", "site"),
        notes=result.notes, cautions=cautions(result, words), weights=result.weights, table=site_table(result),
        sites=[(site, words.sentence(site), words.certificate(site), _details(site, words),
                calibration_picture(site.calibration)) for site in result.sites],
        insurance=words.insurance(), drift=words.drift(), score=words.choice.noun, safe=result.deploy == "safe",
        leaves=[(one.title, words.leaves(one), takers(result, one.name)) for one in chosen],
        own_columns=words.own_columns(), buys=_what_columns_buy(result),
        references=reference_table(result) if result.references else None,
        references_by_site=reference_sites(result) if result.references else None,
        tried=tried_table(result), settings=result.settings, trials=result.trials, left_out=result.left_out,
        models=[(site.site, str(site_path(folder, site.site).relative_to(folder))) for site in result.sites],
        server=str(server_path(folder).relative_to(folder)) if len(result.sites) > 1 else "", apart=result.apart,
        newcomer=words.newcomer(), adopt=adopt_command(result),
    )  # fmt: skip


def _heading(result: FitResult) -> str:
    if result.apart == "site":
        return f"The model of {result.sites[0].site}"
    if len(result.sites) == 1:
        return "A model for the site"
    if all((site.shares or {site.chosen: 1.0}).keys() == {ONE_MODEL} for site in result.sites):
        return f"One model for all {len(result.sites)} sites"
    return f"A model for each of {len(result.sites)} sites"


def _what_columns_buy(result: FitResult) -> str:
    """What the figures of columns that not every site has are of."""
    return (
        "by how much the log loss of a row falls" if result.problem.classifies
        else "by how much the squared error falls, in parts of the target’s variance"
    )  # fmt: skip


def _details(site: SiteRecord, words: Wording) -> str:
    """Promise, prediction sets, calibration and reason of the choice."""
    return " ".join(filter(None, (words.promise(site), words.sets(site), words.calibration(site), words.why(site))))


def calibration_picture(calibration: Calibration | None) -> Markup:
    """A small drawing of what a model says, from left to right, and what was true, upwards: on the diagonal where
    they agree, a dot for each part of the test rows with twice its standard error."""
    if calibration is None or len(calibration.bins) < 2:
        return Markup("")
    ends = [
        end for predicted, true, error, _ in calibration.bins for end in (predicted, true - 2 * error, true + 2 * error)
    ]
    low, high = min(ends), max(ends)
    scale = (PICTURE - 2 * MARGIN) / ((high - low) or 1.0)

    def at(value: float) -> float:
        return round(MARGIN + (value - low) * scale, 1)

    marks = [f'<path d="M{MARGIN} {PICTURE - MARGIN}L{PICTURE - MARGIN} {MARGIN}" stroke-dasharray="4 4"/>']
    for predicted, true, error, _ in calibration.bins:
        x, top, bottom = at(predicted), PICTURE - at(true + 2 * error), PICTURE - at(true - 2 * error)
        marks.append(f'<path d="M{x} {bottom:.1f}V{top:.1f}"/>')
        marks.append(f'<circle cx="{x}" cy="{PICTURE - at(true):.1f}" r="3.5" fill="currentColor"/>')
    return Markup(
        f'<svg viewBox="0 0 {PICTURE} {PICTURE}" width="{PICTURE}" height="{PICTURE}" role="img" '
        f'aria-label="Calibration" fill="none" stroke="currentColor">{"".join(marks)}</svg>'
    )


def adopt_command(result: FitResult) -> str:
    """The command by which a new site gets a model of its own; "" if nothing is learnt from the others."""
    one = result.contender(result.newcomer)
    if one.name in (ALONE, ONE_MODEL):
        return ""
    return (
        f"kinfed adopt {RUNS}/{one.run} --algorithm {one.name} --table new.csv --label-column LABEL "
        "--out new.safetensors"
    )


def short_name(table: str) -> str:
    """A table without its folder; of several files the first, and how many there are."""
    first, *others = table.split(", ")
    return Path(first).name + (f" and {len(others)} more" if others else "")


def takers(result: FitResult, contender: str) -> list[str]:
    return [site.site for site in result.sites if site.chosen == contender]


def cautions(result: FitResult, words: Wording) -> list[str]:
    sentences = []
    if few := [f"{site.site} ({site.test_rows})" for site in result.sites if 0 < site.test_rows < FEW_ROWS]:
        sentences.append(
            f"The figures of {some(few)} come from fewer than {FEW_ROWS} test rows: read them with their intervals."
        )
    one_sided = [site for site in result.sites if site.test_rows >= FEW_ROWS and words.has_few(site)]
    if rare := [f"{site.site} ({site.rare_rows} of class {site.rare_class})" for site in one_sided]:
        sentences.append(
            f"One class has fewer than {FEW_OF_A_CLASS} test rows at {some(rare)}, and the figures depend on them."
        )
    if useless := [site.site for site in result.sites if words.no_model(site)]:
        guess = (
            "its most frequent class" if result.problem.has_classes else f"the {result.baseline} of its training rows"
        )
        sentences.append(f"On test rows the model does no better than always predicting {guess} at {some(useless)}.")
    return sentences


def site_table(result: FitResult) -> TextTable:
    """Every site: its gain first, drawn on one scale, then what it has alone and takes, then the rest."""
    words = Wording(result)
    reach = common_reach([end for site in result.sites for end in (site.gain.low, site.gain.high) if end is not None])
    columns = [
        TableColumn("Site", "name"),
        TableColumn("Gain over alone", definition="Positive is better; with its 95 % interval."),
        TableColumn("Alone", group=words.style.axis_title, definition="The best model that the site trains by itself."),
        TableColumn("Takes", group=words.style.axis_title, definition="What the site is handed."),
        TableColumn("Own share", definition="The part of its own model, trained alone, in what it takes."),
        TableColumn("Chosen", "text", definition="What validation rows spoke for, and what test rows show of it."),
        TableColumn("One for all", group=f"Beside it, {words.style.axis_title}",
                    definition="One model, trained by all sites."),
        TableColumn(words.baseline, group=f"Beside it, {words.style.axis_title}",
                    definition="What the site reaches without a model, by its own training rows alone."),
        TableColumn("Training", group="Rows", definition="Rows that the site's model learnt from."),
        TableColumn("Test", group="Rows", definition="Rows behind the figures to the left."),
    ]  # fmt: skip
    rows = [_site_row(site, words, reach, result) for site in result.sites]
    if result.apart == "consortium":  # what a site alone knows is on its own page
        shown = [place for place, column in enumerate(columns) if column.heading not in words.kept_at_home]
        columns, rows = [columns[place] for place in shown], [[row[place] for place in shown] for row in rows]
    return TextTable.of("Every site", columns, rows)


def common_reach(ends: list[float]) -> float:
    """The reach of drawings to both sides of zero: nine of ten ends of intervals lie within, so that a few sites with
    a handful of rows do not make dots of all others. Longer ones are cut."""
    ordered = sorted(abs(end) for end in ends if end)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else 0.0


def short_table(result: FitResult, most: int) -> TextTable:
    """The first sites for a terminal: what they have alone, and what they take."""
    words = Wording(result)
    name, takes = TableColumn("site", "name"), TableColumn("takes", "text")
    rows = [
        (site.site, f"{site.test_rows:,}", words.value(site.baseline), words.value(site.alone),
         _takes(site, words), words.value(site.deployed),
         "–" if site.gain.value is None else words.gain(site.gain.value).removesuffix(" points"))
        for site in result.sites[:most]
    ]  # fmt: skip
    points = ", gain in points" if words.style.in_percent else ""
    title = f"{words.style.noun} on test rows; baseline: {result.baseline}{points}"
    return TextTable.of(title, [name, "rows", "baseline", "alone", takes, "with it", "gain"], rows)


def _takes(site: SiteRecord, words: Wording) -> str:
    """What a site takes, in a few words: 52 % own, Kin."""
    own = (site.shares or {site.chosen: 1.0}).get(ALONE, 0.0)
    others = words.title(site.chosen) if site.chosen != ALONE else "others"
    return words.title(site.chosen) if own in (0.0, 1.0) else f"{percent(own)} own, {others}"


def _site_row(site: SiteRecord, words: Wording, reach: float, result: FitResult) -> list[TableCell | str]:
    gain, shares = site.gain, site.shares or {site.chosen: 1.0}
    if shares.keys() == {ALONE}:
        cell = TableCell("0", tone="open")
    elif gain.value is None or gain.low is None or gain.high is None:
        cell = TableCell("–", tone="open")
    else:
        tone = ("yes" if gain.value > 0 else "no") if gain.is_clear else "open"
        low, value, high = (min(max(end, -reach), reach) for end in (gain.low, gain.value, gain.high))
        cell = TableCell(words.gain(gain.value), tone=tone, interval=(low, value, high), reach=reach)
    shown = "" if site.chosen == ALONE else ", shown" if site.gain_chosen.is_shown else ", not shown"
    one_model = words.value(site.one_model) if any(one.name == ONE_MODEL for one in result.contenders) else "–"
    return [
        site.site, cell, words.value(site.alone), words.value(site.deployed), percent(shares.get(ALONE, 0.0)),
        f"{words.title(site.chosen)}{shown}", one_model, words.value(site.baseline), f"{site.train_rows:,}",
        f"{site.test_rows:,}",
    ]  # fmt: skip


def reference_table(result: FitResult) -> TextTable:
    """The usual alternatives beside what sites have alone by kinfed and what they get."""
    words, metric = Wording(result), result.known_metric
    columns = [
        TableColumn("What", "name"),
        TableColumn("What sites take is better by", definition="The mean over sites, with its 95 % interval."),
        TableColumn("Mean over sites", group=words.style.axis_title),
        TableColumn("All rows", group=words.style.axis_title,
                    definition="Rankings compare rows of the same site." if metric.by_class else ""),
    ]  # fmt: skip
    rows: list[list[TableCell | str]] = []
    for one in result.references:
        ahead = one.ahead
        tone = ("yes" if (ahead.value or 0) > 0 else "no") if ahead.is_clear else "open"
        gain = "–" if ahead.value is None else words.gain(ahead.value)
        interval = None
        if ahead.value is not None and ahead.low is not None and ahead.high is not None:
            interval = (ahead.low, ahead.value, ahead.high)
        rows.append([
            one.title + (": needs pooled rows" if one.pooled else ""), TableCell(gain, tone=tone, interval=interval),
            *("–" if value is None else words.number(value) for value in (one.value, one.by_rows)),
        ])  # fmt: skip
    return TextTable.of("Beside it", columns, rows)


def reference_sites(result: FitResult) -> TextTable:
    """References site by site, beside learning alone by kinfed and what the site takes."""
    words = Wording(result)
    columns = [TableColumn("Site", "name"), TableColumn("Takes"), TableColumn("Alone, by kinfed")]
    columns += [TableColumn(one.title[0].upper() + one.title[1:]) for one in result.references]
    rows = [
        [site.site, words.value(site.deployed), words.value(site.alone),
         *("–" if one.sites[place] is None else words.number(one.sites[place] or 0.0) for one in result.references)]
        for place, site in enumerate(result.sites)
    ]  # fmt: skip
    return TextTable.of("References, site by site", columns, rows)


def tried_table(result: FitResult) -> TextTable:
    """All contenders, by their validation rows."""
    words = Wording(result)
    columns = [
        TableColumn("What", "name"),
        TableColumn("Kind of model", "text"),
        TableColumn(words.choice.axis_title, group="Validation rows"),
        TableColumn("Gain over alone", group="Validation rows", definition="μ: the mean over sites."),
        TableColumn("Differs by", group="Validation rows", definition="τ: how much sites differ in it, beyond chance."),
        TableColumn("Taken by", group="Choice", definition="Number of sites."),
        TableColumn("Settings", "text", group="Choice", definition="The best of the tries; the others are defaults."),
    ]  # fmt: skip
    rows = []
    for one in result.contenders:
        settings = ", ".join(f"{name} {value:g}" for name, value in one.options.items()) or "defaults"
        alone = one.name == ALONE
        rows.append([
            one.title, words.kind_of_model(one.network), words.score(one.validation),
            "" if alone else words.advantage(one.mean), "" if alone else words.advantage(one.spread).removeprefix("+"),
            str(len(takers(result, one.name))), settings,
        ])  # fmt: skip
    return TextTable.of("What was tried", columns, rows)
