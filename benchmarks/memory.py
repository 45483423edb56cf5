"""Bytes of memory and of traffic per device, for each way to keep the variables.

Read off the compiled train steps of an MLP with Adam, on 1 to 64 virtual devices:
mirrored, `ParameterServerStrategy` with each `shard`, and
`keras.distribution.ModelParallel` with a LayoutMap written by hand. Beside them stands
what the formulas predict.

    python benchmarks/memory.py --devices 1,2,4,8,16,32,64 --plot memory.png
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import environment

WAYS = ("mirrored", "optimizer", "gradients", "parameters", "ModelParallel")
UNITS = 2048  # 14.0 million parameters in all
ROWS = 64  # of the batch, on each device


def sizes(units: int) -> tuple[int, int]:
    """How long a row of inputs and of outputs is: 64 devices divide both."""
    return units * 3 // 4, units * 19 // 32


def model(units: int) -> Any:
    """An MLP whose weights are nearly all in four matrices."""
    import keras
    from keras import layers

    inputs, outputs = sizes(units)
    hidden = [layers.Dense(units, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])


def strategy(way: str) -> Any:
    import keras_mirror as km

    if way == "mirrored":
        return km.MirroredStrategy()
    return km.ParameterServerStrategy(shard=way)  # pyright: ignore


def of_model_parallel(units: int, devices: int) -> dict[str, Any]:
    """Kernels split over the devices along their second axis, by Keras itself."""
    import jax
    import keras

    mesh = keras.distribution.DeviceMesh((1, devices), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    built = model(units)
    built.compile("adam", "mse")
    built.optimizer.build(built.trainable_variables)
    data = tuple(
        jax.ShapeDtypeStruct((ROWS * devices, size), "float32") for size in sizes(units)
    )
    built._symbolic_build(data_batch=data)
    groups = (
        built.trainable_variables,
        built.non_trainable_variables,
        built.optimizer.variables,
        built.metrics_variables,
    )
    state = tuple([v.value for v in group] for group in groups)
    layouts = jax.tree.map(lambda value: value.sharding, state)
    step = jax.jit(built.train_step, donate_argnums=0, out_shardings=(None, layouts))
    memory = step.lower(state, data).compile().memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_sent": None,
    }


def found_here(way: str, units: int) -> dict[str, Any]:
    """What the compiled step takes on the devices of this process."""
    import keras
    import numpy as np

    from keras_mirror import _engine

    devices = len(keras.distribution.list_devices())
    if way == "ModelParallel":
        return of_model_parallel(units, devices)
    built = model(units)
    built.compile("adam", "mse", distribution=strategy(way))
    x, y = (np.zeros((ROWS * devices, size), "float32") for size in sizes(units))
    report = _engine.load().step_report(built, x, y)
    assert report.view == "replica" or devices == 1, report.view
    return {
        "argument_bytes": report.argument_bytes,
        "temporary_bytes": report.temporary_bytes,
        "bytes_sent": report.bytes_sent,
        "collectives": report.collectives,
        "parameter_bytes": 4 * built.count_params(),
        "largest_layer_bytes": 4 * max(x.count_params() for x in built.layers),
    }


def predicted(way: str, devices: int, parameter_bytes: int) -> dict[str, float]:
    """Adam's three copies of the weights, by what is split; ring algorithms."""
    whole = {"mirrored": 3, "optimizer": 1, "gradients": 1}.get(way, 0)
    arguments = parameter_bytes * (whole + (3 - whole) / devices)
    # XLA's CPU compiler merges the two times that weights are put together.
    sent = 2 * (devices - 1) / devices * parameter_bytes
    return {"argument_bytes": arguments, "bytes_sent": sent}


def found_apart(way: str, devices: int, units: int) -> dict[str, Any]:
    """The same in a process that has so many virtual devices."""
    command = [sys.executable, __file__, "--way", way, "--units", str(units)]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": f"{environment.DEVICE_COUNT_FLAG}={devices}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default="1,2,4,8,16,32,64")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--units", type=int, default=UNITS, help="of a hidden layer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="PATH", help="write a picture")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def save_plot(path: str, points: list[dict[str, Any]]) -> None:
    """Bytes of the arguments by devices: what was compiled, and the formulas."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for way in dict.fromkeys(point["way"] for point in points):
        own = [point for point in points if point["way"] == way]
        counts = [point["devices"] for point in own]
        size = [point["argument_bytes"] / 1e6 for point in own]
        (line,) = axes.plot(counts, size, marker="o", linestyle="none", label=way)
        if way != "ModelParallel":
            formula = [point["predicted"]["argument_bytes"] / 1e6 for point in own]
            axes.plot(counts, formula, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("devices (points: compiled; lines: predicted)")
    axes.set_ylabel("MB of state and batch per device")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(points: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="MB per device: compiled (predicted)")
    for name in ("devices", "variables", "state and batch", "temporary", "sent a step"):
        table.add_column(name, justify="right")
    for point in points:
        formula = point["predicted"]
        sent = point["bytes_sent"]
        sent_text = ""
        if sent is not None:
            sent_text = f"{sent / 1e6:.1f} ({formula['bytes_sent'] / 1e6:.1f})"
        is_keras = point["way"] == "ModelParallel"
        table.add_row(
            str(point["devices"]),
            point["way"],
            f"{point['argument_bytes'] / 1e6:.1f}"
            + ("" if is_keras else f" ({formula['argument_bytes'] / 1e6:.1f})"),
            f"{point['temporary_bytes'] / 1e6:.1f}",
            sent_text,
        )
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.way:
        print(json.dumps(found_here(options.way, options.units)))
        return
    points, parameter_bytes = [], 0
    for devices in map(int, options.devices.split(",")):
        for way in options.ways.split(","):
            found = found_apart(way, devices, options.units)
            parameter_bytes = found.get("parameter_bytes", parameter_bytes)
            found["predicted"] = predicted(way, devices, parameter_bytes)
            points.append({"devices": devices, "way": way} | found)
    if options.plot:
        save_plot(options.plot, points)
    if options.json:
        print(json.dumps({"rows_per_device": ROWS, "points": points}))
    else:
        print_table(points)


if __name__ == "__main__":
    environment.prepare()
    main()
