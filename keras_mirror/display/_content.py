"""What both pictures of a mesh share: the checks, the heading, clean lines."""

from collections.abc import Sequence

DEVICES_PER_ROW = 8


def check_mesh(devices: Sequence[str], held: Sequence[Sequence[str]]) -> None:
    """Refuses a picture in which a device has no lines, or lines no device.

    Args:
        devices: device names.
        held: for each device, short lines that say what it holds.

    Raises:
        ValueError: the two lengths differ.
    """
    if len(devices) != len(held):
        raise ValueError(
            "`held` must have one list of lines for each device. "
            f"Received: {len(devices)} devices, {len(held)} lists in `held`. "
            "Pass an empty list for a device that holds nothing."
        )


def heading(count: int, axis_name: str) -> str:
    """The line above the boxes: the axis and how many devices lie along it."""
    noun = "device" if count == 1 else "devices"
    return f"{one_line(axis_name)} axis: {count} {noun}"


def one_line(text: str) -> str:
    """The text with whatever would break a box (line ends, tabs) as blanks."""
    return "".join(char if char.isprintable() else " " for char in str(text))
