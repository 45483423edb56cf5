"""One worker of a job of real processes; `scaling.py` starts it and asks it.

It answers on stdout, one line of JSON each: first what its compiled step sends, then
one answer to each line of stdin ("fit" or "ping"). Worker 0 alone answers.
"""

import argparse
import json
import sys
import time
from typing import Any

import jax
import keras
import models
import numpy as np
from processes import PING_BYTES

import keras_mirror as km
from keras_mirror._engine import load

PINGS = 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True, help="per replica")
    parser.add_argument("--steps", type=int, required=True, help="of one fit")
    return parser.parse_args()


def get_ready(model_name: str) -> keras.Model:
    """The model, compiled under the current strategy."""
    model = models.CASES[model_name].build()
    model.compile(keras.optimizers.Adam(), models.loss(), metrics=["accuracy"])
    return model


def data(model_name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    case = models.CASES[model_name]
    x = np.zeros((rows, *case.input_shape), case.input_dtype)
    return x, np.zeros(rows, "int32")


def counts(model: keras.Model, x: np.ndarray, y: np.ndarray) -> dict[str, int]:
    """What the compiled step sends, by its program."""
    report = load().step_report(model, x, y)
    return {
        "collectives": report.collectives,
        "bytes_sent": report.bytes_sent,
        "parameter_bytes": 4 * model.count_params(),
    }


def ping(mesh: Any) -> list[float]:
    """Seconds of an all-reduce over all devices, for each size of `PING_BYTES`."""
    axes, whole = mesh.axis_names, jax.sharding.PartitionSpec()
    layout = jax.sharding.NamedSharding(mesh, whole)
    found = []
    for size in PING_BYTES:
        host = np.zeros(size // 4, np.float32)
        value = jax.make_array_from_callback(
            host.shape, layout, lambda index, host=host: host[index]
        )
        reduce = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, axes),
                mesh=mesh,
                in_specs=whole,
                out_specs=whole,
                check_vma=False,
            )
        )
        reduce(value).block_until_ready()
        start = time.perf_counter()
        for _ in range(PINGS):
            reduce(value).block_until_ready()
        found.append((time.perf_counter() - start) / PINGS)
    return found


def main() -> None:
    options = parse()
    strategy = km.MultiWorkerMirroredStrategy()
    km.set_strategy(strategy)
    model = get_ready(options.model)
    batch = options.rows * strategy.num_replicas_in_sync
    x, y = data(options.model, batch * options.steps)

    def fit() -> float:
        """Milliseconds of a step."""
        start = time.perf_counter()
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return 1e3 * (time.perf_counter() - start) / options.steps

    def answer(value: Any) -> None:
        if strategy.is_chief:
            print(json.dumps(value), flush=True)

    answer(counts(model, x[:batch], y[:batch]))
    fit()
    for line in sys.stdin:
        answer(fit() if line.strip() == "fit" else ping(strategy.mesh))


if __name__ == "__main__":
    main()
