"""`kinfed arena`: run a method on a frozen suite, verify an entry, make the board."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import CommandGroup
from kinfed.cli.terminal import say

arena = CommandGroup(
    help="A frozen suite that anyone can enter, and entries that anyone can verify.", no_args_is_help=True
)
Folder = Annotated[Path, Option("--out", "-o", help="Folder of entries; what is there is not run again.")]


@arena.command()
def run(
    methods: Annotated[list[str], Argument(help="Methods by name, or of a file of your own: mine.py:Mine.")],
    subset: Annotated[str, Option(help="lite, core or full.")] = "lite",
    out: Folder = Path("arena"),
    suite: Annotated[str, Option(help="Name of the suite, or a file of your own.")] = "arena-1",
) -> None:
    """Run methods on a subset of the suite, with the references that they are compared with, and write their entries.

    Repeat the command to go on where it stopped.
    """
    from kinfed.arena import entry_page, run_entries
    from kinfed.report import write_page

    begin = time.perf_counter()
    try:
        files = run_entries(methods, subset, out, suite_name=suite, say=say)
    except KeyboardInterrupt:
        again = f"kinfed arena run {shlex.join(methods)} --subset {subset} --out {shlex.quote(str(out))}"
        say(f"stopped; federations that are done are saved. To continue: {again}")
        raise typer.Exit(130) from None
    for file in files[-len(methods) :]:
        page = entry_page(file, out)
        write_page(file.with_suffix(".html"), page.html)
        for sentence in page.sentences:
            say(sentence)
        say(f"entry    {file}")
        say(f"page     {file.with_suffix('.html')}")
    say(f"took     {time.perf_counter() - begin:.0f} s")


@arena.command()
def verify(
    entry: Annotated[Path, Argument(help="entry.json")],
    cells: Annotated[
        int,
        Option(min=1, help="Number of federations with a seed, and of tried settings, that are drawn and run again."),
    ] = 8,
    draw: Annotated[int | None, Option(help="Repeat a draw by its number; a new draw cannot be foreseen.")] = None,
    plugin: Annotated[Path | None, Option(help="The method's file, which you have read.")] = None,
    trust_code: Annotated[bool, Option("--trust-code", help="Run the code that is in the entry.")] = False,
) -> None:
    """Run a drawn part of an entry again and compare: bit for bit on the same kind of processor with the same versions.

    An entry that does not hold is refused with exit status 1.
    """
    from kinfed.arena import verify as verify_entry

    begin = time.perf_counter()
    verification = verify_entry(entry, cells, draw=draw, plugin=plugin, trust_code=trust_code, say=say)
    how = (
        "bit for bit"
        if verification.exact
        else "within the tolerance of the suite: processor or versions are not the entry's"
    )
    say(
        f"compared {how}: {len(verification.drawn)} of {verification.all_cells} cells, and "
        f"{len(verification.tried)} of {verification.all_tried} settings that were tried"
    )
    for what, catches in (("cells", verification.catches), ("settings", verification.catches_tried)):
        chances = " and ".join(f"{share:.0%} with {catches(share):.0%}" for share in (0.1, 0.25, 0.5))
        say(f"chances to catch forged {what} with such a draw, by their share: {chances}")
    if not verification.holds:
        for difference in verification.differences:
            say(f"differs  {difference}")
        say(f"refused  {entry} does not hold")
        raise typer.Exit(1)
    say(f"verified {entry}, in {time.perf_counter() - begin:.0f} s")


@arena.command()
def board(
    entries: Annotated[Path, Argument(help="Folder with entries, at any depth.")],
    out: Annotated[
        Path, Option("--out", "-o", help="The page to write, one file that needs no others; or .md.")
    ] = Path("board.html"),
) -> None:
    """Make the board of all entries in a folder: a page without a server."""
    from kinfed.arena import arena_board
    from kinfed.report import write_page

    page = arena_board(entries)
    write_page(out, page.markdown if out.suffix == ".md" else page.html)
    for sentence in page.sentences:
        say(sentence)
    say(f"wrote    {out}")
