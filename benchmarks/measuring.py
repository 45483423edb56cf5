"""Trains each model in each way, in turn, and keeps what was measured."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax
import keras
import models
import numpy as np
from contenders import CONTENDERS, Contender, HandWritten, OneDevice
from watching import LiveBytes, Traffic, compilations

# The first fit, in which everything is compiled.
FIRST_STEPS = 3
CHECK_STEPS = 10
CHECK_TOLERANCE = 1e-5


@dataclass
class Result:
    """What one contender needed for one model.

    Attributes:
        compilations: XLA programs compiled to get the model ready and run 3 steps.
        compile_seconds: time that XLA took for them.
        first_fit_seconds: wall time of getting ready and of these steps.
        live_bytes: most bytes of live arrays on any one device during training.
        traffic: what the compiled step sends.
        milliseconds: time per step, one figure a round.
        cpu_milliseconds: CPU time per step of all threads, one figure a round.
        recompilations: programs compiled during the timed rounds.
    """

    compilations: int
    compile_seconds: float
    first_fit_seconds: float
    live_bytes: int
    traffic: Traffic
    milliseconds: list[float] = field(default_factory=list)
    cpu_milliseconds: list[float] = field(default_factory=list)
    recompilations: int = 0


Results = dict[str, Result]
Progress = Callable[[str], None]


def measure(case: models.Case, rounds: int, steps: int, progress: Progress) -> Results:
    """Measures all contenders on one model, interleaved.

    Args:
        case: the model.
        rounds: how often each contender trains for `steps` steps.
        steps: steps of one timed fit.
        progress: called with a line of text now and then.

    Returns:
        A result for each contender, by name.
    """
    x, y = case.data(steps)
    contenders = [
        make(jax.local_devices(), keras.optimizers.Adam) for make in CONTENDERS
    ]
    results = {}
    for contender in contenders:
        progress(f"{case.title}: {contender.title} compiles")
        results[contender.name] = get_ready(contender, case, x, y)
    for contender in contenders:  # `get_ready` cleared the caches of those before
        contender.fit(x, y)
    for number in range(rounds):
        progress(f"{case.title}: round {number + 1} of {rounds}")
        run_round(shuffled(contenders, number), x, y, steps, results)
    return results


def get_ready(
    contender: Contender, case: models.Case, x: np.ndarray, y: np.ndarray
) -> Result:
    """Builds and compiles a contender, looking at what that takes."""
    jax.clear_caches()  # else the first contender compiles what all share
    gc.collect()
    rows = FIRST_STEPS * models.BATCH_SIZE
    live_bytes = LiveBytes(contender.devices)
    contender.build(case)
    start = time.perf_counter()
    with compilations() as compiled:
        contender.start()
        contender.fit(x[:rows], y[:rows])
    first_fit_seconds = time.perf_counter() - start
    contender.fit(x[:rows], y[:rows], live_bytes)
    return Result(
        compilations=compiled.number,
        compile_seconds=compiled.seconds,
        first_fit_seconds=first_fit_seconds,
        live_bytes=live_bytes.most,
        traffic=contender.traffic(x[: models.BATCH_SIZE], y[: models.BATCH_SIZE]),
    )


def shuffled(contenders: list[Contender], seed: int) -> Iterable[Contender]:
    """Another order each round: none always runs after the same neighbour."""
    order = np.random.default_rng(seed).permutation(len(contenders))
    return [contenders[i] for i in order]


def run_round(
    contenders: Iterable[Contender],
    x: np.ndarray,
    y: np.ndarray,
    steps: int,
    results: Results,
) -> None:
    """Times one fit of each contender."""
    for contender in contenders:
        result = results[contender.name]
        gc.collect()
        with compilations() as compiled:
            start, cpu_start = time.perf_counter(), time.process_time()
            contender.fit(x, y)
            seconds = time.perf_counter() - start
            cpu_seconds = time.process_time() - cpu_start
        result.milliseconds.append(1000 * seconds / steps)
        result.cpu_milliseconds.append(1000 * cpu_seconds / steps)
        result.recompilations += compiled.number


def check(case: models.Case) -> float:
    """Trains by hand and on one device, from equal weights, on even batches.

    With SGD: Adam would divide out a wrong factor of the gradients.

    Returns:
        The largest difference between two weights afterwards.

    Raises:
        AssertionError: it is above `CHECK_TOLERANCE`.
    """

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.05, momentum=0.9)

    x, y = case.data(CHECK_STEPS)
    weights = []
    for make in (HandWritten, OneDevice):
        contender = make(jax.local_devices(), optimizer)
        contender.build(case)
        contender.start()
        contender.fit(x, y)
        weights.append(contender.weights())
    difference = max(np.abs(a - b).max() for a, b in zip(*weights, strict=True))
    if not difference < CHECK_TOLERANCE:
        raise AssertionError(
            f"The hand-written loop is wrong on {case.title}: its weights differ from "
            f"those of one device by {difference:.1e} after {CHECK_STEPS} steps."
        )
    return float(difference)
