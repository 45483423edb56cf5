"""How long training takes, with the time that JAX compiles kept apart."""

import statistics
import time
from typing import Any

import jax
import keras
from jax import monitoring

# What JAX reports about making a program: Python traced, lowered, compiled by XLA.
_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Measures the time in which JAX traces, lowers or compiles programs.

    A context manager; JAX's own monitoring events are the source. Traces nest (a
    jitted function inside another), so spans are merged rather than added up.

    Example:

    ```python
    with CompileClock() as clock:
        model.fit(x, y)
    print(clock.seconds())
    ```
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> "CompileClock":
        _running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.remove(self)

    def add(self, start: float, stop: float) -> None:
        """Counts one span in which a program was made, in seconds of `time.time`."""
        self._spans.append((start, stop))

    def seconds(self) -> float:
        """Seconds until now in which at least one program was being made."""
        total, covered_until = 0.0, 0.0
        for start, stop in sorted(self._spans):
            total += max(0.0, stop - max(start, covered_until))
            covered_until = max(covered_until, stop)
        return total


_running: list[CompileClock] = []


def _record(event: str, start_time: float, end_time: float, **kwargs: Any) -> None:
    if event in _COMPILE_EVENTS:
        for clock in _running:
            clock.add(start_time, end_time)


# Once for the process: JAX before 0.10 has no way to take a listener away.
monitoring.register_event_time_span_listener(_record)


class EpochClock(keras.callbacks.Callback):
    """Measures the training part of each epoch, without its validation.

    Args:
        compile_clock: A running clock; what it counts in an epoch is taken off.
    """

    def __init__(self, compile_clock: CompileClock):
        super().__init__()
        self._compile_clock = compile_clock
        self._start: tuple[float, float] | None = None
        self._epoch_seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = (time.perf_counter(), self._compile_clock.seconds())

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops it: validation is no training."""
        self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops it, where there was no validation."""
        self._stop()

    def _stop(self) -> None:
        if self._start is None:
            return
        # JAX returns before the work is done: wait for the last step.
        model: Any = self.model
        jax.block_until_ready([v.value for v in model.trainable_variables])
        started, compiled = self._start
        passed = time.perf_counter() - started
        self._epoch_seconds.append(passed - (self._compile_clock.seconds() - compiled))
        self._start = None

    def examples_per_second(self, rows: int) -> float:
        """Rows trained per second in the median epoch.

        The first epoch is left out where there is another, since it warms caches
        up besides compiling.

        Args:
            rows: Rows of the training data.
        """
        measured = self._epoch_seconds[1:] or self._epoch_seconds
        return rows / max(statistics.median(measured), 1e-9)
