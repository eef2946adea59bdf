"""The sections of the report about one comparison, each a heading, some figures and what to see in them."""

from __future__ import annotations

import json

import kinfed.report.panels.apfl_panel
import kinfed.report.panels.cgpfl_panel
import kinfed.report.panels.clusters_panel
import kinfed.report.panels.fedfomo_panel
import kinfed.report.panels.selffl_panel  # noqa: F401  (a panel registers itself)
from kinfed.report import client_figures, figures, tables
from kinfed.report.comparison import Comparison, cautions
from kinfed.report.html import choice, download, drawing, esc, fold, notes, scroll
from kinfed.report.panels import privacy_panel
from kinfed.report.panels.panel import Panel, panels
from kinfed.report.sentences import (
    best_federated,
    counted,
    data_notes,
    data_sentence,
    facts,
    findings,
    headline_kind,
    leads,
    seeds_of,
)
from kinfed.report.statistics import gains
from kinfed.report.tables_html import balance_table, leads_table, results_table

MAX_OPEN_PANEL_FIGURES = 16  # more are drawn only when asked for


class Sections:
    """Headings start at the given level; ids carry the prefix."""

    def __init__(self, comparison: Comparison, prefix: str = "", level: int = 2) -> None:
        self.comparison = comparison
        self.prefix = prefix
        self.level = level
        made = {
            ("run", "What was run"): self._what_was_run(),
            ("results", "Results"): self._results(),
            ("rounds", "Over the rounds"): self._rounds(),
            ("clients", "From client to client"): self._clients(),
            ("gain", "Who is helped, who is hurt"): self._gains(),
            ("cost", "What it costs"): self._cost(),
            ("privacy", "What privacy costs"): self._privacy(),
            ("data", "Who holds which data"): self._data(),
            ("inside", "Inside the methods"): self._inside(),
            ("tables", "Tables to take away"): self._tables(),
        }
        present = {key: body for key, body in made.items() if body}
        self.links = [(prefix + name, title) for name, title in present]
        self.html = "\n".join(
            f'<section id="{prefix}{name}">{self._heading(title)}{body}</section>'
            for (name, title), body in present.items()
        )

    def summary(self) -> str:
        said = "".join(f"<p>{esc(sentence)}</p>" for sentence in findings(self.comparison))
        return (f'<div class="lead">{said}</div>' if said else "") + notes(cautions(self.comparison))

    def _heading(self, title: str, below: int = 0) -> str:
        level = self.level + below
        return f"<h{level}>{esc(title)}</h{level}>"

    def _what_was_run(self) -> str:
        runs = self.comparison.runs
        found = [facts(run) for run in runs]
        if len(runs) == 1:
            rows = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in found[0].items())
            listing = f'<dl class="facts">{rows}</dl>'
        else:
            keys = dict.fromkeys(key for entry in found for key in entry)
            head = "".join(f'<th scope="col">{esc(run.label)}</th>' for run in runs)
            rows = "".join(
                f'<tr><th scope="row">{esc(key)}</th>'
                + "".join(f"<td>{esc(entry.get(key, '–'))}</td>" for entry in found)
                + "</tr>"
                for key in keys
            )
            head = f'<thead><tr><th scope="col">Setting</th>{head}</tr></thead>'
            listing = scroll(f'<table class="plain">{head}<tbody>{rows}</tbody></table>', "What was run")
        for run in runs:
            text = json.dumps(run.config, indent=2, ensure_ascii=False)
            of = f" of {run.label}" if len(runs) > 1 else ""
            listing += fold(f"Full configuration{of}", f'<pre tabindex="0">{esc(text)}</pre>')
        return listing

    def _results(self) -> str:
        comparison = self.comparison
        if not comparison.methods:
            return ""
        rounds = sorted({method.final_round for method in comparison.methods})
        seeds = seeds_of(comparison)
        where = f"round {rounds[0]}, the last" if len(rounds) == 1 else "each method’s last evaluated round"
        if not comparison.same_seeds:
            spread = "Shown are mean ± standard deviation over the seeds that a method has finished, accuracies in %."
        elif seeds > 1:
            spread = f"Shown are mean ± standard deviation over {counted(seeds, 'seed')}, accuracies in %."
        else:
            spread = "Accuracies are in %. There is one seed, so no spread is known and no best is marked."
        body = (
            f"<p>All figures are from {where}, not from the best round along the way. Personal models are tested by "
            "each client on its own test examples; the server model, where a method has one, is tested by every "
            f"client likewise. {spread}</p>"
        )
        body += scroll(results_table(tables.results(comparison)), "Results by method")
        kind = headline_kind(comparison)
        if seeds > 1:
            body += (
                "<p>★ marks a method that leads <em>every</em> other by more than the spread: the mean of the "
                "differences seed by seed exceeds their standard deviation. It guards against reading noise; it is "
                "not a significance test.</p>"
            )
            if kind and (found := leads(comparison, kind)):
                caption = f"How clear is the lead of {found[0].label} in {kind} accuracy?"
                body += fold(caption, scroll(leads_table(found), caption))
        if "server" in comparison.kinds:
            more = results_table(tables.results(comparison, tables.GLOBAL_COLUMNS))
            body += fold("More about the server models", scroll(more, "Server models by method"))
        columns = {column.heading: column.definition for column in tables.MAIN_COLUMNS}
        terms = "".join(f"<dt>{esc(name)}</dt><dd>{esc(definition)}</dd>" for name, definition in columns.items())
        return body + fold("What the columns mean", f'<dl class="terms">{terms}</dl>')

    def _rounds(self) -> str:
        figure = figures.learning_curves(self.comparison)
        if figure is None:
            return ""
        better = "higher" if self.comparison.metric == "accuracy" else "lower"
        band = " The band is one standard deviation over seeds." if seeds_of(self.comparison) > 1 else ""
        caption = f"How the models improve as the clients exchange them: {better} and earlier is better.{band}"
        return choice(figure, "Model") + drawing(figure, caption)

    def _clients(self) -> str:
        rows = figures.distribution(self.comparison)
        shares = figures.cumulative_shares(self.comparison)
        if rows is None or shares is None:
            text = "<p>Accuracies of the single clients are written when a method has run to its end.</p>"
            return text if self.comparison.methods and self.comparison.metric == "accuracy" else ""
        dots = (
            "Every dot is one client (with one seed); the box holds the middle half of them and the line in it is the "
            "median. A good average can hide clients far to the left."
        )
        shapes = "The shapes show how many clients reach which accuracy; the inner box holds the middle half of them."
        below = (
            "The same clients, counted: a line further to the right means that more clients are served well, and a "
            "line that rises late leaves few behind."
        )
        caption = dots if rows.data[0]["type"] == "box" else shapes
        return choice(rows, "Model") + drawing(rows, caption) + drawing(shares, below)

    def _gains(self) -> str:
        comparison = self.comparison
        others = [method for method in comparison.methods if method.family != "local"]
        if not others or comparison.metric != "accuracy":
            return ""
        if len(others) == len(comparison.methods):
            return (
                "<p>This needs the baseline in which every client trains alone: add <code>local</code> to the "
                "algorithms of the run.</p>"
            )
        by_method = [(method, found) for method in others if (found := gains(comparison, method))]
        if not by_method:
            return "<p>The gain over Local is known once Local and another method have run to their end.</p>"
        first = best_federated(comparison)
        first = next((method for method, _ in by_method if method is first), by_method[0][0])
        bars = client_figures.sorted_gains(by_method, first)
        sizes = client_figures.gain_against_size(by_method, first)
        seeds = " and seed" if any(len(method.counted) > 1 for method, _ in by_method) else ""
        return (
            "<p>The question behind every federation: is a client better off than had it trained alone? Gains "
            "compare each client’s personal accuracy with Local, same seed, same test examples. A client with "
            "few test examples moves in large steps, so single bars are coarse; the balance is what counts.</p>"
            + scroll(balance_table(by_method), "Clients helped and hurt by each method")
            + choice(bars, "Method")
            + drawing(bars, f"One bar per client{seeds}: coloured ones gained over training alone, gray ones lost.")
            + drawing(
                sizes,
                "Do small or large clients gain? Dots are clients; the thick line joins the medians of clients of "
                "similar size, thin gray lines are those of the other methods.",
            )
        )

    def _cost(self) -> str:
        figure = figures.bytes_against_accuracy(self.comparison)
        if figure is None:
            return ""
        caption = (
            f"What {self.comparison.metric} costs in communication: further left is cheaper. A method that sends "
            "nothing is drawn as a level dotted line where it ends."
        )
        return choice(figure, "Model") + drawing(figure, caption)

    def _privacy(self) -> str:
        figure = privacy_panel.accuracy_against_epsilon(self.comparison)
        if figure is None:
            return ""
        caption = (
            f"What {self.comparison.metric} costs in privacy, round by round: further left, less can be learned about "
            "any training example. Runs with other noise or clipping, shown on one page, give other lines. A method "
            "without privacy is drawn as a level dotted line where it ends."
        )
        return choice(figure, "Model") + drawing(figure, caption)

    def _data(self) -> str:
        federations = self.comparison.federations
        figure = client_figures.class_map(federations)
        if figure is None:
            return ""
        federation = next(one for _, one in sorted(federations.items()) if one.names)
        colour = "The stronger the colour of a square, the larger its class among the examples there."
        if len(federation.names) > client_figures.MAX_COLUMNS:
            by = "group" if federation.groups else "similar mix of classes"
            how = f"The {counted(len(federation.names), 'client')} are pooled by {by}. {colour}"
        else:
            how = f"Each column is a client, sorted by {'group' if federation.groups else 'main class'}. {colour}"
        said = "".join(f"<p>{esc(text)}</p>" for text in (data_sentence(federation), *data_notes(federations)))
        return said + choice(figure, "Seed") + drawing(figure, how)

    def _inside(self) -> str:
        made = [(method, entries) for method in self.comparison.methods if (entries := panels(method))]
        folded = sum(len(entry.figures) for _, entries in made for entry in entries) > MAX_OPEN_PANEL_FIGURES
        blocks = []
        for method, entries in made:
            body = "".join(self._panel(entry) for entry in entries)
            count = sum(len(entry.figures) for entry in entries)
            blocks.append(self._heading(method.label, 1) + (fold(counted(count, "figure"), body) if folded else body))
        return "".join(blocks)

    def _panel(self, panel: Panel) -> str:
        drawn = "".join(drawing(figure) for figure in panel.figures)
        grid = f'<div class="grid">{drawn}</div>' if len(panel.figures) > 1 or _small(panel) else drawn
        return f"{self._heading(panel.title, 2)}<p>{esc(panel.sentence)}</p>{grid}"

    def _tables(self) -> str:
        comparison = self.comparison
        if not comparison.methods:
            return ""
        files = (
            ("methods.csv", "one line per method", tables.results_csv(comparison)),
            ("seeds.csv", "one line per method and seed", tables.seeds_csv(comparison)),
            ("rounds.csv", "one line per method, seed and round", tables.rounds_csv(comparison)),
            ("clients.csv", "one line per method, seed and client", tables.clients_csv(comparison)),
            ("results.tex", "the table of results for LaTeX with booktabs", tables.latex(tables.results(comparison))),
        )
        items = "".join(f"<li>{download(*file)}</li>" for file in files)
        source = f"{self.prefix}markdown"
        return fold(
            "CSV files, a LaTeX and a Markdown table",
            f'<ul class="files">{items}</ul><p><label for="{source}">The table of results as Markdown</label></p>'
            f'<textarea id="{source}" readonly spellcheck="false">'
            f"{esc(tables.markdown(tables.results(comparison)))}</textarea>"
            f'<button type="button" class="button" data-copies="{source}">Copy</button>',
        )


def _small(panel: Panel) -> bool:
    return all(figure.height < 300 for figure in panel.figures)
