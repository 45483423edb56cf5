"""Counts the programs that JAX compiles for one script; run as a process.

Arguments: "plain" or a strategy name. Prints one JSON object: programs per call.
"""

import json
import sys

import jax
import keras
import numpy as np

import keras_mirror as km

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: (
        compiled.append(name)
        if name == "/jax/core/compile/backend_compile_duration"
        else None
    )
)


def counted(call):
    before = len(compiled)
    call()
    return len(compiled) - before


def main(strategy):
    if strategy != "plain":
        km.set_strategy(strategy)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, 6)).astype("float32")
    y = rng.integers(0, 3, 44)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    print(
        json.dumps(
            {
                "fit": counted(
                    lambda: model.fit(x[:32], y[:32], batch_size=16, verbose=0)
                ),
                "tail": counted(lambda: model.fit(x, y, batch_size=16, verbose=0)),
                "again": counted(
                    lambda: model.fit(x, y, batch_size=16, epochs=3, verbose=0)
                ),
                "evaluate": counted(
                    lambda: model.evaluate(x, y, batch_size=16, verbose=0)
                ),
                "predict": counted(lambda: model.predict(x, batch_size=16, verbose=0)),
                "train_on_batch": counted(lambda: model.train_on_batch(x[:16], y[:16])),
                "weights": counted(model.get_weights),
            }
        )
    )


main(sys.argv[1])
