"""Tables of bytes: text for terminals, HTML with bars for notebooks."""

import html
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from keras_mirror.display._content import one_line

_UNITS = ("B", "kB", "MB", "GB", "TB")
_COLUMNS = 100
_FIGURE = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px"
_CELL = "padding:2px 12px 2px 0;text-align:left;white-space:nowrap"
_TRACK = (
    "display:inline-block;width:160px;height:10px;margin-right:8px;"
    "border:1px solid currentColor;border-radius:3px;overflow:hidden"
)
_FILL = "display:block;height:100%;background:rgba(66,133,244,0.6)"


def bytes_text(count: float) -> str:
    """A number of bytes as people read it: 1.5 MB (of 1000 kB)."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def table_text(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal of 100 columns.

    Args:
        title: The line above it.
        head: The name of each column; the first is aligned left, others right.
        rows: Of each row, the text of each cell.

    Returns:
        Lines joined by `"\\n"`, without one at the end.
    """
    table = Table(title=title, title_justify="left", title_style="")
    for number, name in enumerate(head):
        justify = "right" if number else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    file = io.StringIO()
    console = Console(file=file, width=_COLUMNS, no_color=True, markup=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def bars_html(title: str, bars: Sequence[tuple[str, int]]) -> str:
    """Bars of bytes, one a name, the longest as wide as all others are measured by."""
    most = max((count for _, count in bars), default=0) or 1
    lines = "".join(
        f'<tr><td style="{_CELL}">{_escaped(name)}</td><td style="{_CELL}">'
        f'<span style="{_TRACK}"><span style="{_FILL};width:{100 * count / most:.1f}%">'
        f"</span></span>{bytes_text(count)}</td></tr>"
        for name, count in bars
    )
    label = _escaped(title)
    return (
        f'<div role="figure" aria-label="{label}" style="{_FIGURE}">'
        f"<div>{label}</div><table>{lines}</table></div>"
    )


def table_html(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table of `table_text` for notebooks."""
    cells = [f'<th style="{_CELL}">{_escaped(name)}</th>' for name in head]
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL}">{_escaped(cell)}</td>' for cell in row)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div style="{_FIGURE};overflow-x:auto"><div>{_escaped(title)}</div>'
        f"<table><tr>{''.join(cells)}</tr>{body}</table></div>"
    )


def _escaped(text: str) -> str:
    return html.escape(one_line(text))
