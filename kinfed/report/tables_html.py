"""Tables of the report as HTML."""

from __future__ import annotations

from itertools import groupby

from kinfed.report.comparison import Method
from kinfed.report.html import esc, swatch, theme_colors
from kinfed.report.statistics import Difference, Gain, summarize_gains
from kinfed.report.tables import Table, cell_text, points
from kinfed.runs.reader import finite


def _method_cell(method: Method) -> str:
    return f'<th scope="row">{swatch(method.style)}{esc(method.label)}</th>'


def results_table(table: Table) -> str:
    groups = [(name, len(list(columns))) for name, columns in groupby(table.columns, key=lambda column: column.group)]
    opening = set()
    position = 0
    for _, width in groups:
        opening.add(position)
        position += width
    over = "".join(f'<th colspan="{width}" scope="colgroup">{esc(name)}</th>' for name, width in groups)
    heads = []
    for i, column in enumerate(table.columns):
        name = f'<abbr title="{esc(column.definition)}">{esc(column.heading)}</abbr>'
        opens = ' class="opens"' if i in opening else ""
        heads.append(f'<th scope="col"{opens}><button type="button" value="{i + 1}">{name}</button></th>')
    rows = []
    for method, cells in zip(table.methods, table.cells, strict=True):
        row = [_method_cell(method)]
        for i, (column, cell) in enumerate(zip(table.columns, cells, strict=True)):
            mean, spread = cell_text(column, cell)
            classes = [name for name, on in (("best", cell.best), ("opens", i in opening)) if on]
            attributes = f' class="{" ".join(classes)}"' if classes else ""
            if cell.average is not None and finite(cell.average.mean):
                attributes += f' data-value="{cell.average.mean:.9g}"'
            tail = f' <span class="spread">± {spread}</span>' if spread and column.judged else ""
            said = '<span class="unseen"> (best)</span>' if cell.best else ""
            row.append(f"<td{attributes}>{mean}{tail}{said}</td>")
        rows.append(f"<tr>{''.join(row)}</tr>")
    return (
        f'<table><thead><tr class="groups"><td></td>{over}</tr><tr><th scope="col">Method</th>{"".join(heads)}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def leads_table(found: tuple[Method, list[tuple[Method, Difference | None]]]) -> str:
    rows = []
    for method, lead in found[1]:
        if lead is None:
            cells = '<td>–</td><td>–</td><td>–</td><td>–</td><td class="text">not to be judged: too few seeds</td>'
        else:
            ahead = "not paired" if lead.ahead is None else f"{lead.ahead} of {lead.n}"
            verdict = "yes" if lead.clear else "no, within the spread"
            likely = "–" if lead.likely is None else f"{points(lead.likely.low)} to {points(lead.likely.high)}"
            cells = (
                f"<td>{points(lead.mean)}</td><td>{likely}</td><td>{100 * lead.spread:.1f}</td><td>{ahead}</td>"
                f'<td class="text">{verdict}</td>'
            )
        rows.append(f"<tr>{_method_cell(method)}{cells}</tr>")
    names = ("Over", "Lead, points", "95 % interval", "Spread", "Seeds ahead", "Clear?")
    heads = "".join(f'<th scope="col">{h}</th>' for h in names)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def balance_table(by_method: list[tuple[Method, list[Gain]]]) -> str:
    """Clients helped, unchanged and hurt, as numbers and as a bar of their shares."""
    rows = []
    for method, values in by_method:
        s = summarize_gains(values)
        parts = "".join(
            f'<span class="{name}" style="flex-grow:{count}"></span>'
            for name, count in (("helped", s.helped), ("unchanged", s.unchanged), ("hurt", s.hurt))
            if count
        )
        figures = (
            ("", f'<div class="balance" style="{theme_colors(method.style)}" aria-hidden="true">{parts}</div>'),
            (s.helped, str(s.helped)),
            (s.unchanged, str(s.unchanged)),
            (s.hurt, str(s.hurt)),
            (s.mean, points(s.mean)),
            (s.median, points(s.median)),
            (s.lowest, points(s.lowest)),
        )
        cells = "".join(f'<td data-value="{value}">{text}</td>' for value, text in figures)
        rows.append(f"<tr>{_method_cell(method)}{cells}</tr>")
    names = ("Helped", "Unchanged", "Hurt", "Mean gain", "Median gain", "Largest loss")
    heads = "".join(
        f'<th scope="col"><button type="button" value="{i + 2}">{name}</button></th>' for i, name in enumerate(names)
    )
    return (
        f'<table><thead><tr><th scope="col">Method</th><th scope="col" class="text">Balance</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
