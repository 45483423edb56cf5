"""What a step sends as replicas are added, and the speed that this predicts.

    python benchmarks/scaling.py [--devices 2,4,8,16,32,64] [--model mlp] [--json]
                                 [--step-ms T] [--bandwidth GBPS] [--latency US]

For each number of virtual devices, in a process of its own: compiles the train step
with the same rows per replica and counts its collectives and the bytes that one device
sends, from the compiled program. Then predicts the time of a step by the alpha-beta
model of a ring all-reduce (Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005):

    step + collectives * 2 (n - 1) * latency + bytes sent / bandwidth

with nothing overlapped, so it is an upper bound. The inputs are stated beside the
result; nothing is timed here.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import environment

ROWS_PER_REPLICA = 64


@dataclass(frozen=True)
class Point:
    """The compiled step on so many devices.

    Attributes:
        devices: Replicas.
        collectives: Collective operations per step.
        bytes_sent: What each device sends per step.
        bytes_per_parameter_byte: The same over the bytes of the gradients; a ring's
            lower bound is 2 (n - 1) / n.
        milliseconds: Predicted time of a step.
        efficiency: Predicted speed per replica, over that of one alone.
    """

    devices: int
    collectives: int
    bytes_sent: int
    bytes_per_parameter_byte: float
    milliseconds: float
    efficiency: float


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="2,4,8,16,32,64")
    parser.add_argument("--model", default="mlp", help="mlp, mlp_bn, cnn, transformer")
    parser.add_argument("--step-ms", type=float, default=5.0, help="compute of a step")
    parser.add_argument("--bandwidth", type=float, default=12.5, help="GB/s a device")
    parser.add_argument("--latency", type=float, default=5.0, help="us a message")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def count(model_name: str, devices: int) -> dict[str, int]:
    """What the step sends on so many devices; runs in this process."""
    import keras
    import models
    import numpy as np

    import keras_mirror as km
    from keras_mirror._engine import load

    case = models.CASES[model_name]
    model = case.build()
    strategy = km.MirroredStrategy(keras.distribution.list_devices()[:devices])
    model.compile(
        keras.optimizers.Adam(),
        models.loss(),
        metrics=["accuracy"],
        distribution=strategy,
    )
    rows = ROWS_PER_REPLICA * devices
    x = np.zeros((rows, *case.input_shape), case.input_dtype)
    report = load().step_report(model, x, np.zeros(rows, "int32"))
    return {
        "collectives": report.collectives,
        "bytes_sent": report.bytes_sent,
        "parameter_bytes": 4 * model.count_params(),
    }


def count_apart(model_name: str, devices: int) -> dict[str, int]:
    """The same in a process that has so many virtual devices."""
    flag = f"{environment.DEVICE_COUNT_FLAG}={devices}"
    done = subprocess.run(
        [sys.executable, __file__, "--model", model_name, "--count", str(devices)],
        env=os.environ | {"XLA_FLAGS": flag},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def predict(found: dict[str, int], devices: int, options: argparse.Namespace) -> Point:
    """The alpha-beta model."""
    messages = found["collectives"] * 2 * (devices - 1)
    milliseconds = (
        options.step_ms
        + messages * options.latency / 1e3
        + found["bytes_sent"] / options.bandwidth / 1e6
    )
    return Point(
        devices=devices,
        collectives=found["collectives"],
        bytes_sent=found["bytes_sent"],
        bytes_per_parameter_byte=found["bytes_sent"] / found["parameter_bytes"],
        milliseconds=milliseconds,
        efficiency=options.step_ms / milliseconds,
    )


def print_table(points: list[Point], options: argparse.Namespace) -> None:
    from reporting import new_table
    from rich.console import Console

    title = (
        f"{options.model}: {ROWS_PER_REPLICA} rows per replica; {options.step_ms:g} ms "
        f"compute, {options.bandwidth:g} GB/s, {options.latency:g} us"
    )
    table = new_table(
        title, "collectives", "MB sent", "x gradients", "ms predicted", "efficiency"
    )
    for point in points:
        table.add_row(
            f"{point.devices} devices",
            str(point.collectives),
            f"{point.bytes_sent / 1e6:.3f}",
            f"{point.bytes_per_parameter_byte:.3f}",
            f"{point.milliseconds:.2f}",
            f"{point.efficiency:.2f}",
        )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    environment.prepare()
    if options.count is not None:
        print(json.dumps(count(options.model, options.count)))
        return 0
    devices = [int(part) for part in options.devices.split(",")]
    points = [predict(count_apart(options.model, n), n, options) for n in devices]
    if options.json:
        shown: dict[str, Any] = vars(options) | {"points": [asdict(p) for p in points]}
        print(json.dumps(shown, indent=2))
    else:
        print_table(points, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
