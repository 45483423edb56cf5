"""The demo's picture: what each device holds of one step, read off the arrays."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras


def held_by_devices(
    model: keras.Model, devices: Sequence[str], batch_rows: int
) -> list[list[str]]:
    """Says for each device which rows and how much of the variables it holds.

    Args:
        model: A built model, bound to a strategy.
        devices: Names of the strategy's devices, in replica order.
        batch_rows: Rows of the global batch.

    Returns:
        For each device a few short lines, for `keras_mirror.display`.
    """
    weights = _bytes_by_device(model.variables)
    slots = _bytes_by_device(model.optimizer.variables)
    everything = sum(
        v.value.nbytes for v in [*model.variables, *model.optimizer.variables]
    )
    optimizer = type(model.optimizer).__name__.lower()
    rows = rows_by_device(batch_rows, len(devices))
    return [
        [
            rows_held,
            f"weights {bytes_text(weights[name])}",
            f"{optimizer} {bytes_text(slots[name])}",
            "full copy" if weights[name] + slots[name] == everything else "a part",
        ]
        for name, rows_held in zip(devices, rows, strict=True)
    ]


def rows_by_device(batch_rows: int, num_devices: int) -> list[str]:
    """Which rows of the global batch each device gets, in words.

    Args:
        batch_rows: Rows of the global batch.
        num_devices: How many devices share it. A batch that they do not divide
            is padded to a multiple; the padding takes no part in the result.
    """
    each = -(-batch_rows // num_devices)
    starts = range(0, each * num_devices, each)
    stops = [min(start + each, batch_rows) for start in starts]
    return [
        "padding alone"
        if start >= stop
        else f"row {start}"
        if start + 1 == stop
        else f"rows {start}-{stop - 1}"
        for start, stop in zip(starts, stops, strict=True)
    ]


def bytes_text(count: int) -> str:
    """Bytes with three digits and a decimal unit, as "38.9 kB"."""
    value, units = float(count), ["kB", "MB", "GB", "TB"]
    if count < 1000:
        return f"{count} B"
    value /= 1000
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    # 38.92 -> 38.9, 407.1 -> 407: "{:.3g}" would write 1e+03 for the largest.
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {units[0]}"


def _bytes_by_device(variables: Iterable[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for variable in variables:
        for shard in variable.value.addressable_shards:
            found[f"{shard.device.platform}:{shard.device.id}"] += shard.data.nbytes
    return found
