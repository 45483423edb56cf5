"""Figures, aims, table and plot from what was measured."""

from dataclasses import asdict, dataclass
from typing import Any

import models
import numpy as np
from contenders import CONTENDERS
from measuring import Result, Results
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

HAND_WRITTEN, DATA_PARALLEL, OURS = "hand_written", "data_parallel", "keras_mirror"
TITLES = {contender.name: contender.title for contender in CONTENDERS}


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        median, low, high = (
            f"{value:.{digits}f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low}-{high})"


def spread(values: Any) -> Spread:
    low, median, high = np.percentile(values, (25, 50, 75))
    return Spread(float(median), float(low), float(high))


def ratio(above: Result, below: Result) -> Spread:
    """Time of `above` per time of `below`, taken round by round.

    Two contenders of one round ran within the same second or so: whatever else the
    machine did then, it did to both.
    """
    return spread(np.divide(above.milliseconds, below.milliseconds))


def figures(results: Results) -> dict[str, Any]:
    """All figures of one model, for `--json`."""
    found = {}
    for name, result in results.items():
        found[name] = asdict(result) | {
            "milliseconds_per_step": asdict(spread(result.milliseconds)),
            "time_per_hand_written": asdict(ratio(result, results[HAND_WRITTEN])),
            "speed_per_data_parallel": asdict(ratio(results[DATA_PARALLEL], result)),
        }
    return found


@dataclass(frozen=True)
class Aim:
    """An aim of the project and what was found.

    Attributes:
        text: the aim, with its model.
        found: the figure that decides it.
        is_met: whether the figure reaches it.
    """

    text: str
    found: float
    is_met: bool


def aims(name: str, results: Results) -> list[Aim]:
    """The aims that concern one model."""
    title = models.CASES[name].title
    by_hand = ratio(results[OURS], results[HAND_WRITTEN]).median
    speed = ratio(results[DATA_PARALLEL], results[OURS]).median
    text = f"{title}: at most 1.10 times the hand-written loop's time"
    found = [Aim(text, by_hand, by_hand <= 1.10)]
    if name.startswith("mlp"):
        text = f"{title}: at least 1.25 times DataParallel's speed"
        found.append(Aim(text, speed, speed >= 1.25))
    text = f"{title}: at least 0.95 times DataParallel's speed"
    found.append(Aim(text, speed, speed >= 0.95))
    return found


def print_tables(console: Console, name: str, results: Results) -> None:
    """Prints the two tables of one model."""
    title = models.CASES[name].title
    console.print(times(title, results))
    console.print(costs(title, results))


def print_aims(console: Console, all_results: dict[str, Results]) -> None:
    """Prints what the tables mean, and which aims are met."""
    console.print(
        "Median (quartiles) over the rounds. `/ by hand`: time, per time of the loop\n"
        "by hand. `DataParallel /`: time of DataParallel, per time. Both are taken\n"
        "round by round. CPU ms: all threads together; what else the machine does\n"
        "disturbs it less.\n"
    )
    for name, results in all_results.items():
        for aim in aims(name, results):
            mark = "met    " if aim.is_met else "NOT MET"
            line = f"{mark}  {aim.text}: {aim.found:.2f}"
            console.print(line, highlight=False, soft_wrap=True)


def new_table(title: str, *headings: str) -> Table:
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("", no_wrap=True)
    for heading in headings:
        found.add_column(heading, justify="right", no_wrap=True)
    return found


def times(title: str, results: Results) -> Table:
    """How long a step takes."""
    found = new_table(title, "ms per step", "/ by hand", "DataParallel /", "CPU ms")
    for name, result in results.items():
        found.add_row(
            TITLES[name],
            spread(result.milliseconds).text(1),
            ratio(result, results[HAND_WRITTEN]).text(2),
            ratio(results[DATA_PARALLEL], result).text(2),
            f"{np.median(result.cpu_milliseconds):.1f}",
        )
    return found


def costs(title: str, results: Results) -> Table:
    """What else a contender costs: compiling, traffic, and memory per device."""
    found = new_table(
        f"{title}: costs", "compiled", "compile s", "collectives", "MB sent", "MB live"
    )
    for name, result in results.items():
        found.add_row(
            TITLES[name],
            compilations_text(result),
            f"{result.compile_seconds:.1f}",
            str(result.traffic.collectives),
            f"{result.traffic.bytes_sent / 1e6:.2f}",
            f"{result.live_bytes / 1e6:.2f}",
        )
    return found


def compilations_text(result: Result) -> str:
    later = f" (+{result.recompilations} later)" if result.recompilations else ""
    return f"{result.compilations}{later}"


def save_plot(path: str, all_results: dict[str, Results]) -> None:
    """Draws time per step relative to the hand-written loop, quartiles as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(TITLES)
    for i, (name, title) in enumerate(TITLES.items()):
        found = [ratio(r[name], r[HAND_WRITTEN]) for r in all_results.values()]
        middle = [one.median for one in found]
        below = [one.median - one.low for one in found]
        above = [one.high - one.median for one in found]
        places = np.arange(len(found)) + (i - 1.5) * width
        axes.bar(places, middle, width, label=title, yerr=(below, above), capsize=2)
    axes.axhline(1, color="black", linewidth=0.8)
    names = [models.CASES[name].title for name in all_results]
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("time per step / hand-written")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
