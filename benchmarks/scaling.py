"""What a step sends as replicas are added, and the speed that this predicts.

    python benchmarks/scaling.py [--devices 2,4,8,16,32,64] [--model mlp] [--measure]
                                 [--processes 1x1,2x1,4x1,2x2] [--json] [--plot PATH]
                                 [--step-ms T] [--bandwidth GBPS] [--latency US]

For each number of virtual devices, in a process of its own, and for each layout of real
processes (processes x devices of each): compiles the train step with the same rows per
replica and counts its collectives and the bytes that one device sends, from the
compiled program. Then predicts the time of a step by the alpha-beta model of a ring
all-reduce (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005):

    step + collectives * 2 (n - 1) * latency + bytes sent / bandwidth

with nothing overlapped, nothing but the collectives counted, and a core or accelerator
for each replica. The inputs are stated beside the result.

With `--measure` the jobs of real processes train in turn, in rounds, and each layout's
time is given per time of 1x1 in the same round (weak scaling). The latency, the
bandwidth and the step that are not given are then measured too: two sizes of an
all-reduce between the processes of the first layout that has several, and a step of
1x1. Without it nothing is timed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import environment
from processes import PING_BYTES, Job, Layout, parse_layouts

ROWS_PER_REPLICA = 64
DEFAULTS = {"step_ms": 5.0, "bandwidth": 12.5, "latency": 5.0}
ALONE = Layout(1, 1)


@dataclass(frozen=True)
class Point:
    """The compiled step on so many replicas.

    Attributes:
        devices: Replicas.
        layout: "2x1" for two processes with a device each; None for virtual devices of
            one process.
        collectives: Collective operations per step.
        bytes_sent: What each device sends per step.
        bytes_per_parameter_byte: The same over the bytes of the gradients; a ring's
            lower bound is 2 (n - 1) / n.
        milliseconds: Predicted time of a step.
        efficiency: Predicted speed per replica, over that of one alone.
        measured_milliseconds: Of a step, one figure a round; empty without `--measure`.
        measured_ratios: The same per time of 1x1 in the same round.
    """

    devices: int
    layout: str | None
    collectives: int
    bytes_sent: int
    bytes_per_parameter_byte: float
    milliseconds: float
    efficiency: float
    measured_milliseconds: list[float] = field(default_factory=list)
    measured_ratios: list[float] = field(default_factory=list)


@dataclass
class Found:
    """What the job of one layout has said.

    Attributes:
        layout: Its processes and devices.
        counts: What its compiled step sends.
        milliseconds: Of a step, one figure a round.
        pings: Seconds of an all-reduce of each size, one pair a round.
    """

    layout: Layout
    counts: dict[str, int]
    milliseconds: list[float] = field(default_factory=list)
    pings: list[list[float]] = field(default_factory=list)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="2,4,8,16,32,64")
    parser.add_argument(
        "--processes", default="1x1,2x1,4x1,2x2", help='layouts, or "none"'
    )
    parser.add_argument("--model", default="mlp", help="mlp, mlp_bn, cnn, transformer")
    parser.add_argument("--measure", action="store_true", help="train and time")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--steps", type=int, default=20, help="of one fit")
    parser.add_argument("--step-ms", type=float, help="compute of a step; 5")
    parser.add_argument("--bandwidth", type=float, help="GB/s a device; 12.5")
    parser.add_argument("--latency", type=float, help="us a message; 5")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="PATH", help="write a picture")
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.measure and ALONE not in parse_layouts(found.processes):
        parser.error("--measure compares with 1x1, which --processes must name")
    return found


def count(model_name: str, devices: int) -> dict[str, int]:
    """What the step sends on so many devices; runs in this process."""
    import keras
    import scaling_worker

    import keras_mirror as km

    km.set_strategy(km.MirroredStrategy(keras.distribution.list_devices()[:devices]))
    model = scaling_worker.get_ready(model_name)
    return scaling_worker.counts(
        model, *scaling_worker.data(model_name, ROWS_PER_REPLICA * devices)
    )


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


def run_jobs(options: argparse.Namespace) -> list[Found]:
    """Counts, and with `--measure` times, each layout of real processes."""
    layouts = parse_layouts(options.processes)
    rows, steps = str(ROWS_PER_REPLICA), str(options.steps)
    arguments = ["--model", options.model, "--rows", rows, "--steps", steps]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(layout, arguments)) for layout in layouts]
        found = [Found(job.layout, job.answer()) for job in jobs]
        for _ in range(options.rounds if options.measure else 0):
            for job, about in zip(jobs, found, strict=True):
                about.milliseconds.append(job.ask("fit"))
                if job.layout.replicas > 1:
                    about.pings.append(job.ask("ping"))
    return found


def take_inputs(options: argparse.Namespace, found: list[Found]) -> dict[str, str]:
    """Fills in the inputs of the model that were not given.

    Returns:
        Where each comes from: "given", "measured" or "default".
    """
    import numpy as np

    measured: dict[str, float] = {}
    for about in found:
        if about.layout == ALONE and about.milliseconds:
            measured["step_ms"] = float(np.median(about.milliseconds))
        if about.pings and "latency" not in measured:
            times = np.median(about.pings, axis=0)
            measured |= alpha_beta(times[0], times[1], about.layout.replicas)
    sources = {}
    for name, default in DEFAULTS.items():
        if getattr(options, name) is not None:
            sources[name] = "given"
            continue
        sources[name] = "measured" if name in measured else "default"
        setattr(options, name, measured.get(name, default))
    return sources


def alpha_beta(small: float, large: float, replicas: int) -> dict[str, float]:
    """The two inputs from the seconds of a small and a large all-reduce."""
    share = 2 * (replicas - 1) / replicas  # of the bytes, sent by each
    seconds_per_byte = (large - small) / share / (PING_BYTES[1] - PING_BYTES[0])
    alone = small - share * PING_BYTES[0] * seconds_per_byte
    return {
        "latency": 1e6 * alone / (2 * (replicas - 1)),
        "bandwidth": 1e-9 / seconds_per_byte,
    }


def predict(
    counts: dict[str, int], devices: int, options: argparse.Namespace, **measured: Any
) -> Point:
    """The alpha-beta model."""
    messages = counts["collectives"] * 2 * (devices - 1)
    milliseconds = (
        options.step_ms
        + messages * options.latency / 1e3
        + counts["bytes_sent"] / options.bandwidth / 1e6
    )
    return Point(
        devices=devices,
        collectives=counts["collectives"],
        bytes_sent=counts["bytes_sent"],
        bytes_per_parameter_byte=counts["bytes_sent"] / counts["parameter_bytes"],
        milliseconds=milliseconds,
        efficiency=options.step_ms / milliseconds,
        **({"layout": None} | measured),
    )


def point_of(about: Found, alone: list[float], options: argparse.Namespace) -> Point:
    """A layout of real processes, beside the layout 1x1."""
    ratios = [a / b for a, b in zip(about.milliseconds, alone, strict=True)]
    return predict(
        about.counts,
        about.layout.replicas,
        options,
        layout=str(about.layout),
        measured_milliseconds=about.milliseconds,
        measured_ratios=ratios if options.measure else [],
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    environment.prepare()
    if options.count is not None:
        print(json.dumps(count(options.model, options.count)))
        return 0
    devices = [int(part) for part in options.devices.split(",")]
    counts = [count_apart(options.model, n) for n in devices]
    found = run_jobs(options)
    sources = take_inputs(options, found)
    alone = next((a.milliseconds for a in found if a.layout == ALONE), [])
    points = [predict(c, n, options) for c, n in zip(counts, devices, strict=True)]
    points += [point_of(about, alone, options) for about in found]
    shown: dict[str, Any] = vars(options) | {
        "rows_per_replica": ROWS_PER_REPLICA,
        "cores": len(os.sched_getaffinity(0)),
        "sources": sources,
        "points": [asdict(point) for point in points],
    }
    show(points, shown)
    return 0


def show(points: list[Point], shown: dict[str, Any]) -> None:
    """Prints the table or the JSON, and writes the picture."""
    import scaling_report

    if shown["plot"]:
        scaling_report.save_plot(shown["plot"], points, shown)
    if shown["json"]:
        print(json.dumps(shown, indent=2))
    else:
        scaling_report.print_tables(points, shown)


if __name__ == "__main__":
    sys.exit(main())
