"""The demo's result on stdout: a table, or one JSON object."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from keras_mirror.demo.comparison import Comparison


def print_json(comparison: Comparison) -> None:
    """Prints the comparison as one JSON object to stdout."""
    print(json.dumps(as_json(comparison), indent=2, allow_nan=False))


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a program reads it.

    Args:
        comparison: What the demo found.

    Returns:
        The object that `keras-mirror demo --json` prints; its keys are part of
        the public interface.
    """
    return {
        "num_replicas": comparison.num_replicas,
        "strategy": comparison.strategy,
        "one_device": asdict(comparison.one_device),
        "replicas": asdict(comparison.replicas),
        "max_weight_difference": comparison.max_weight_difference,
        "collectives_per_step": comparison.collectives_per_step,
        "bytes_per_step": comparison.bytes_per_step,
    }


def print_table(comparison: Comparison) -> None:
    """Prints one device beside the replicas to stdout, and how each was measured."""
    console = Console()
    count = comparison.num_replicas
    table = Table(title=None)
    table.add_column("")
    table.add_column("one device", justify="right")
    replicas = "1 replica" if count == 1 else f"{count} replicas"
    table.add_column(replicas, justify="right")
    one, many = comparison.one_device, comparison.replicas
    for label, attribute, form in (
        ("final loss", "final_loss", ".6f"),
        ("accuracy", "accuracy", ".4f"),
        ("validation accuracy", "val_accuracy", ".4f"),
        ("examples/s", "examples_per_second", ",.0f"),
        ("compile seconds", "compile_seconds", ".2f"),
    ):
        cells = [format(getattr(run, attribute), form) for run in (one, many)]
        table.add_row(label, *cells)
    table.add_section()
    difference = f"{comparison.max_weight_difference:.1e}"
    table.add_row("largest weight difference", "", difference)
    table.add_row("collectives per step", "", str(comparison.collectives_per_step))
    table.add_row("bytes per step", "", f"{comparison.bytes_per_step:,}")
    console.print(table)
    for note in notes(comparison):
        console.print(f"- {note}", style="dim", highlight=False, markup=False)


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know to read the table right.

    Args:
        comparison: What the demo found.

    Returns:
        One sentence or two for each measured quantity that needs it.
    """
    epochs = comparison.settings.epochs
    timed = (
        "the only epoch, less the time in which JAX compiled"
        if epochs == 1
        else "the median epoch after the first, which compiles"
    )
    found = [
        _difference_note(comparison.settings.optimizer),
        f"examples/s: rows trained per second, without validation; {timed}.",
        "compile seconds: time in fit in which JAX traced, lowered or compiled.",
        "bytes per step: what each device sends to the others in one train step.",
    ]
    if comparison.num_replicas > 1 and comparison.devices[0].startswith("cpu:"):
        found.append(
            "Virtual CPU devices share the cores of this machine: the replicas show "
            "that the numbers are right here, not how fast accelerators are."
        )
    return found


def _difference_note(optimizer: str) -> str:
    if optimizer.lower() == "sgd":
        return (
            "largest weight difference: over all weights, after training. With SGD a "
            "wrong factor in the gradients (a sum for a mean) would show here."
        )
    return (
        "largest weight difference: over all weights, after training. It says most "
        "with --optimizer sgd: Adam and its relatives divide constant factors out, "
        "so they would hide a sum taken for a mean."
    )
