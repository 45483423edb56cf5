"""The table and the picture of `scaling.py`."""

from typing import Any

import numpy as np
from reporting import new_table, spread
from rich.console import Console
from rich.table import Table


def inputs(shown: dict[str, Any]) -> str:
    """What the prediction was made from, in words."""
    sources = shown["sources"]
    return (
        f"{shown['step_ms']:.3g} ms compute ({sources['step_ms']}), "
        f"{shown['bandwidth']:.3g} GB/s ({sources['bandwidth']}), "
        f"{shown['latency']:.3g} us ({sources['latency']})"
    )


def cores(shown: dict[str, Any]) -> str:
    """What the machine can show at all."""
    count = shown["cores"]
    return (
        f"This machine has {count} cores: what is measured cannot scale beyond {count} "
        "replicas, which the prediction does not know."
    )


def name(point: Any) -> str:
    if point.layout is None:
        return f"{point.devices} devices"
    workers, devices = point.layout.split("x")
    return f"{workers} x {devices} processes"


def predictions(points: list[Any], title: str) -> Table:
    """What each step sends, and the time that this predicts."""
    table = new_table(
        title, "collectives", "MB sent", "x gradients", "ms", "efficiency"
    )
    for point in points:
        table.add_row(
            name(point),
            str(point.collectives),
            f"{point.bytes_sent / 1e6:.3f}",
            f"{point.bytes_per_parameter_byte:.3f}",
            f"{point.milliseconds:.2f}",
            f"{point.efficiency:.2f}",
        )
    return table


def measurements(points: list[Any]) -> Table:
    """What a step of real processes took: median and quartiles over the rounds."""
    table = new_table("measured", "ms", "per time of 1 x 1", "predicted")
    for point in points:
        table.add_row(
            name(point),
            spread(point.measured_milliseconds).text(1),
            spread(point.measured_ratios).text(2),
            f"{1 / point.efficiency:.2f}",
        )
    return table


def print_tables(points: list[Any], shown: dict[str, Any]) -> None:
    """The predictions, and what was measured where something was."""
    console = Console()
    title = f"{shown['model']}: {shown['rows_per_replica']} rows per replica"
    console.print(predictions(points, title))
    lines = [f"Predicted from {inputs(shown)}."]
    measured = [point for point in points if point.measured_ratios]
    if measured:
        console.print(measurements(measured))
        lines += ["Measured: median (quartiles) over the rounds.", cores(shown)]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def save_plot(path: str, points: list[Any], shown: dict[str, Any]) -> None:
    """Draws time per step, per one replica's: predicted curve, measured points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curve = {1: 1.0} | {p.devices: 1 / p.efficiency for p in points if not p.layout}
    counts = sorted(curve)
    axes.plot(counts, [curve[n] for n in counts], marker=".", label="predicted")
    measured = [point for point in points if point.measured_ratios]
    if measured:
        found = [spread(point.measured_ratios) for point in measured]
        middle = np.array([one.median for one in found])
        below = middle - [one.low for one in found]
        above = [one.high for one in found] - middle
        places = [point.devices for point in measured]
        style = {"fmt": "o", "capsize": 3, "label": "measured (quartiles)"}
        axes.errorbar(places, middle, (below, above), **style)
        for point, height in zip(measured, middle, strict=True):
            offset = {"xytext": (6, 3), "textcoords": "offset points"}
            axes.annotate(point.layout, (point.devices, height), **offset)
        axes.set_title(f"measured on {shown['cores']} cores", fontsize="small")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"replicas, {shown['rows_per_replica']} rows each\n{inputs(shown)}")
    axes.set_ylabel("time per step / one replica's")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
