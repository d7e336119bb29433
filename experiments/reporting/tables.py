"""`tables.md`: every table of an experiment, printed and kept."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDE = 160  # characters in a line of a table, where no terminal says


def show_table(out: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and add it to `tables.md`: the first column is words, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)  # no digit is cut off, in a file least
    rule = ["---", *["---:"] * (len(columns) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
    with (out / "tables.md").open("a") as file:
        file.write("\n".join([title, "", *lines]) + "\n\n")
