"""The pictures at the head of the pages of method families: what the server has, what travels, what clients have.

    python docs/generate/method_pictures.py        writes docs/pictures/methods/*.svg; a test compares them

Blue is what all share, a colour of its own what a client keeps to itself, grey what is not trained."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "pictures" / "methods"
SHARED, OTHER, FROZEN = "#3b6fc4", "#b04a9a", "#c8ccd1"
OWN = ("#dd6418", "#0b8457", "#8a5bd1")  # by client
Bar = tuple[str, list[tuple[float, str]]]  # what it is; its parts: share of the width, colour


@dataclass(frozen=True)
class Family:
    title: str
    server: str
    down: str
    up: str
    clients: tuple[list[Bar], list[Bar], list[Bar]]
    models: tuple[str, ...] = (SHARED,)  # colours of what the server has


def _alike(*bars: tuple[str, str]) -> tuple[list[Bar], list[Bar], list[Bar]]:
    """The same bars at every client; parts by letters: s shared, o own, f frozen."""
    one, two, three = (
        [
            (name, [(1 / len(parts), {"s": SHARED, "o": own, "f": FROZEN}[part]) for part in parts])
            for name, parts in bars
        ]
        for own in OWN
    )
    return one, two, three


def _mixed() -> tuple[list[Bar], list[Bar], list[Bar]]:
    shares = ((0.6, 0.3, 0.1), (0.3, 0.6, 0.1), (0.05, 0.1, 0.85))
    one, two, three = ([("a mix of models", list(zip(row, OWN, strict=True)))] for row in shares)
    return one, two, three


FAMILIES = {
    "one-model": Family(
        "One model for all: the server averages what clients train", "one model", "the model", "an update",
        _alike(("the same model, trained on", "s")),
    ),
    "near-a-shared-model": Family(
        "Every client has a model of its own, held near a shared one", "shared model", "the shared model", "an update",
        _alike(("shared model", "s"), ("own model, held near it", "o")),
    ),
    "own-layers": Family(
        "Some layers are shared, the others are the client's own", "shared layers", "shared layers",
        "their update", _alike(("shared layers, own layers", "sso")),
    ),
    "clusters": Family(
        "Several models, and every client trains the one of its group", "a model for each group", "models of groups",
        "an update",
        ([("first group", [(1, SHARED)])], [("first group", [(1, SHARED)])], [("second group", [(1, OTHER)])]),
        (SHARED, OTHER),
    ),
    "who-helps-whom": Family(
        "Every client gets a mix of models of its own", "all clients' models", "models, or their mix", "the own model",
        _mixed(), OWN,
    ),
    "kin": Family(
        "A client deploys a mixture of what it learns alone, together and adapted", "models of groups",
        "a model and shares", "an update and shares",
        _alike(("alone", "o"), ("together", "s"), ("adapted", "so")), (SHARED, OTHER),
    ),
    "features-and-losses": Family(
        "The loss is changed at features or logits", "shared model", "the model", "an update",
        _alike(("body, features, logits", "sss"), ("loss at features and logits", "o")),
    ),
    "public-examples": Family(
        "Models of any kind learn from each other's predictions on public examples", "mean predictions",
        "what all say", "what the own model says", _alike(("own model, of any kind", "o"), ("public examples", "f")),
        (FROZEN,),
    ),
    "different-models": Family(
        "Models of different kinds exchange what has one shape", "a vector for each class", "class vectors",
        "class vectors",
        ([("a large model", [(1, OWN[0])])], [("a medium one", [(0.65, OWN[1])])], [("a small one", [(0.35, OWN[2])])]),
    ),
    "hypernetwork": Family(
        "A network at the server makes every client's model", "a network that makes models", "the client's model",
        "its update", _alike(("the model made for it", "o")), OWN,
    ),
    "sums": Family(
        "Clients send sums over their rows, and the server solves for the model", "solves for the model",
        "coefficients", "sums over rows", _alike(("common, own deviation", "sso")),
    ),
    "trees": Family(
        "Shared trees from sums of histograms, and a personal part", "shared trees", "trees", "sums by bins",
        _alike(("shared trees, own part", "sso")),
    ),
    "adapters": Family(
        "Only small adapters of a frozen model are trained and sent", "shared adapters", "adapters", "their update",
        _alike(("frozen model", "ffff"), ("adapters A, B", "so")),
    ),
    "uncertainty": Family(
        "How far a client goes from the shared model follows from how uncertain both are", "shared model",
        "the model, two scalars", "an update, a variance",
        _alike(("shared model", "s"), ("own model ± its error", "o")),
    ),
}  # fmt: skip

_WIDTH, _TOP = 190, 128


def picture(family: Family) -> str:
    rows = max(len(client) for client in family.clients)
    height = _TOP + 40 + 40 * rows + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" font-family="system-ui, sans-serif" '
        f'font-size="14" fill="#1c1f23" role="img"><title>{escape(family.title)}</title>',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L10 5 L0 10 z" fill="#5d636b"/></marker></defs>',
        f'<rect width="640" height="{height}" rx="10" fill="#fff"/>',
        '<rect x="205" y="12" width="230" height="72" rx="8" fill="#eef3fa" stroke="#17468f"/>',
        f'<text x="320" y="35" text-anchor="middle">{escape(family.server)}</text>',
    ]
    each = 190 / len(family.models)
    for number, color in enumerate(family.models):
        parts.append(
            f'<rect x="{225 + number * each:g}" y="48" width="{each - 6:g}" height="20" rx="4" fill="{color}"/>'
        )
    for number, client in enumerate(family.clients):
        x = 20 + number * 205
        middle = x + _WIDTH / 2
        end = (250, 320, 390)[number]
        parts += [
            f'<path d="M{end - 7} 88 L{middle - 7:g} {_TOP - 6}" stroke="#5d636b" fill="none" marker-end="url(#tip)"/>',
            f'<path d="M{middle + 7:g} {_TOP - 4} L{end + 7} 90" stroke="#5d636b" fill="none" stroke-dasharray="4 3" '
            'marker-end="url(#tip)"/>',
            f'<rect x="{x}" y="{_TOP}" width="{_WIDTH}" height="{height - _TOP - 12}" rx="8" fill="#f8f8f9" '
            'stroke="#b3b8be"/>',
            f'<text x="{x + 14}" y="{_TOP + 24}" font-weight="600">client {"ABC"[number]}</text>',
        ]
        for row, (name, segments) in enumerate(client):
            y, left = _TOP + 36 + 40 * row, x + 14.0
            for share, color in segments:
                wide = share * (_WIDTH - 28)
                parts.append(f'<rect x="{left:g}" y="{y}" width="{wide - 2:g}" height="16" rx="3" fill="{color}"/>')
                left += wide
            parts.append(f'<text x="{x + 14}" y="{y + 31}" font-size="12" fill="#5d636b">{escape(name)}</text>')
    parts += [
        f'<text x="20" y="52" font-size="13" fill="#5d636b">down: {escape(family.down)}</text>',
        f'<text x="620" y="52" font-size="13" fill="#5d636b" text-anchor="end">up: {escape(family.up)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    return {PICTURES / f"{name}.svg": picture(family) for name, family in FAMILIES.items()}


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for place, content in files().items():
        place.write_text(content, "utf-8")
