"""Texts in CSV files that people open with a spreadsheet, which reads some of them as formulas and runs them."""

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(text: str) -> str:
    """The text, led by an apostrophe where a spreadsheet would read a formula; numbers stay as they are."""
    return f"'{text}" if _is_formula(text) else text


def unescape_formula(cell: str) -> str:
    """The text that `escape_formula` made this cell of."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell[1:]) else cell


def _is_formula(text: str) -> bool:
    """Apostrophes in front do not count, so that every text comes back."""
    return text.lstrip("'").startswith(_FORMULA_STARTS) and not _is_number(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
