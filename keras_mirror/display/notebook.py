"""The mesh as HTML for notebooks."""

import html
from collections.abc import Sequence

from keras_mirror.display._content import (
    DEVICES_PER_ROW,
    check_mesh,
    heading,
    one_line,
)

# Text and edges take the notebook's own text colour and the fills are nearly
# transparent, so that one picture is readable on light and on dark pages. All
# styles are inline: notebooks drop <style> blocks and scripts when they show
# a stored output.
_FIGURE = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px"
_HEADING = "opacity:0.75;margin-bottom:6px"
_SCROLL = "overflow-x:auto;padding-bottom:4px"
_BOX = (
    "border:1px solid currentColor;border-radius:6px;padding:6px 10px;"
    "background:rgba(66,133,244,0.12)"
)
_NAME = "font-weight:bold;white-space:nowrap"
_LINE = "font-size:12px;white-space:nowrap;opacity:0.85"


def mesh_html(
    devices: Sequence[str],
    held: Sequence[Sequence[str]],
    axis_name: str = "replica",
) -> str:
    """Draws the devices of a mesh as HTML boxes, each with what it holds.

    Args:
        devices: device names in mesh order, such as `["cpu:0", "cpu:1"]`.
        held: for each device, short lines that say what it holds.
        axis_name: name of the mesh axis along which the devices lie.

    Returns:
        One self-contained `<div>` with inline styles, no scripts and nothing to
        load; every text in it is escaped. Rows have at most 8 boxes and scroll
        sideways where the page is narrower.

    Raises:
        ValueError: `devices` and `held` differ in length.

    Example:

    >>> picture = mesh_html(["cpu:0", "cpu:1"], [["rows 0-3"], ["rows 4-7"]])
    >>> picture.count("rows")
    2
    """
    check_mesh(devices, held)
    title = _escaped(heading(len(devices), axis_name))
    boxes = "".join(
        _box(name, lines) for name, lines in zip(devices, held, strict=True)
    )
    columns = max(1, min(len(devices), DEVICES_PER_ROW))
    grid = f"display:grid;gap:6px;grid-template-columns:repeat({columns},max-content)"
    return (
        f'<div role="figure" aria-label="{title}" style="{_FIGURE}">'
        f'<div style="{_HEADING}">{title}</div>'
        f'<div style="{_SCROLL}"><div style="{grid}">{boxes}</div></div>'
        "</div>"
    )


def _box(name: str, lines: Sequence[str]) -> str:
    body = "".join(f'<div style="{_LINE}">{_escaped(line)}</div>' for line in lines)
    return (
        f'<div style="{_BOX}"><div style="{_NAME}">{_escaped(name)}</div>{body}</div>'
    )


def _escaped(text: str) -> str:
    return html.escape(one_line(text))
