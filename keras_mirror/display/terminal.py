"""The mesh as boxes of text."""

import unicodedata
from collections.abc import Iterator, Sequence

from keras_mirror.display._content import (
    DEVICES_PER_ROW,
    check_mesh,
    heading,
    one_line,
)

# One long variable name must not make all boxes of a mesh as wide as itself.
_LONGEST_LINE = 40
_ASCII = str.maketrans("┌┐└┘─│…", "++++-|~")


def mesh_text(
    devices: Sequence[str],
    held: Sequence[Sequence[str]],
    axis_name: str = "replica",
    *,
    columns: int | None = None,
) -> str:
    """Draws the devices of a mesh as boxes, each with what it holds.

    Args:
        devices: device names in mesh order, such as `["cpu:0", "cpu:1"]`.
        held: for each device, short lines that say what it holds; a line of
            more than 40 columns is cut.
        axis_name: name of the mesh axis along which the devices lie.
        columns: width of the terminal; a row then has as many boxes as fit, at
            least one. Rows have at most 8 boxes in any case.

    Returns:
        Lines joined by `"\\n"`, without one at the end.

    Raises:
        ValueError: `devices` and `held` differ in length.

    Example:

    >>> print(mesh_text(["cpu:0", "cpu:1"], [["rows 0-3"], ["rows 4-7"]]))
    replica axis: 2 devices
    ┌─ cpu:0 ──┐ ┌─ cpu:1 ──┐
    │ rows 0-3 │ │ rows 4-7 │
    └──────────┘ └──────────┘
    """
    check_mesh(devices, held)
    names = [_cut(one_line(name)) for name in devices]
    bodies = [[_cut(one_line(line)) for line in lines] for lines in held]
    width = _inner_width(names, bodies)
    per_row = _boxes_per_row(width, columns)
    lines = [heading(len(names), axis_name)]
    for start in range(0, len(names), per_row):
        row = slice(start, start + per_row)
        lines.extend(_row_lines(names[row], bodies[row], width))
    return "\n".join(lines)


def to_ascii(picture: str) -> str:
    """The picture for a terminal whose encoding has no box characters.

    Args:
        picture: what `mesh_text` returned.

    Returns:
        The same lines with `+`, `-` and `|` for the boxes and `?` for any other
        character outside ASCII.
    """
    return picture.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _inner_width(names: list[str], bodies: list[list[str]]) -> int:
    # The top edge is "─ name ─", two columns more than the padded name.
    widths = [_columns(name) + 2 for name in names]
    widths += [_columns(line) for body in bodies for line in body]
    return max(widths, default=0)


def _boxes_per_row(width: int, columns: int | None) -> int:
    if columns is None:
        return DEVICES_PER_ROW
    box = width + 4
    return max(1, min(DEVICES_PER_ROW, (columns + 1) // (box + 1)))


def _row_lines(names: list[str], bodies: list[list[str]], width: int) -> Iterator[str]:
    yield " ".join(f"┌{_fill(f'─ {name} ', width + 2, '─')}┐" for name in names)
    for index in range(max(len(body) for body in bodies)):
        cells = [body[index] if index < len(body) else "" for body in bodies]
        yield " ".join(f"│ {_fill(cell, width, ' ')} │" for cell in cells)
    yield " ".join(f"└{'─' * (width + 2)}┘" for _ in names)


def _fill(text: str, width: int, filler: str) -> str:
    return text + filler * (width - _columns(text))


def _cut(text: str) -> str:
    if _columns(text) <= _LONGEST_LINE:
        return text
    while _columns(text) > _LONGEST_LINE - 1:
        text = text[:-1]
    return text + "…"


def _columns(text: str) -> int:
    """Terminal columns: East Asian wide characters take two, marks take none."""
    return sum(
        0
        if unicodedata.combining(char)
        else 2
        if unicodedata.east_asian_width(char) in "WF"
        else 1
        for char in text
    )
