"""Recurrent models, masks, and state that is carried between batches."""

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    ROWS,
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    to_numpy,
    weights_of_rows,
)

STEPS, WORDS = 8, 20


def padded(rows=ROWS, per_step=True, seed=5):
    """Within each batch of 8 the lengths rise from 1 to all the steps.

    The first replica then holds 3 valid steps and the last one 15.
    """
    rng = np.random.default_rng(seed)
    words = np.zeros((rows, STEPS), "int32")
    for row in range(rows):
        length = 1 + row % 8
        words[row, :length] = rng.integers(1, WORDS, length)
    tags = (words + np.arange(rows)[:, None]) % 4
    return words, (tags if per_step else tags[:, 0]).astype("int32")


def weights_of_steps():
    """Keras takes no weights of rank 1 where the mask has rank 2."""
    return weights_of_rows()[:, None] * np.linspace(0.5, 2.0, STEPS, dtype="float32")


def embedded(*stack):
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            layers.Embedding(WORDS, 5, mask_zero=True),
            *stack,
            layers.Dense(4),
        ]
    )


def simple_rnn():
    return layers.SimpleRNN(4, return_sequences=True)


# Compiling a recurrence is slow: LSTM alone and GRU alone have one test below.
RECURRENT = {
    "bidirectional_lstm": lambda: layers.Bidirectional(
        layers.LSTM(3, return_sequences=True)
    ),
    "bidirectional_gru": lambda: layers.Bidirectional(
        layers.GRU(3, return_sequences=True), merge_mode="sum"
    ),
}
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("name", RECURRENT)
def test_masked_sequences_match_one_device(name):
    drive = fit_evaluate_predict(*padded())
    check(lambda: embedded(RECURRENT[name]()), compiled(LOGITS, 0.3), drive)


@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_with_sample_weight"])
def test_reduction_over_valid_steps_matches_one_device(reduction):
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    rate = 0.01 if reduction == "sum" else 0.3
    drive = fit(*padded(), sample_weight=weights_of_steps())
    check(lambda: embedded(simple_rnn()), compiled(loss, rate), drive)


def test_last_valid_step_matches_one_device():
    drive = fit_evaluate_predict(*padded(per_step=False))
    check(lambda: embedded(layers.LSTM(4)), compiled(LOGITS, 0.3), drive)


def test_masked_metrics_match_one_device():
    def compile_args():
        return compiled(LOGITS, 0.3)() | {
            "metrics": [keras.metrics.SparseCategoricalAccuracy(name="plain")],
            "weighted_metrics": [
                keras.metrics.SparseCategoricalAccuracy(name="weighted")
            ],
        }

    drive = fit_evaluate_predict(*padded(), sample_weight=weights_of_steps())
    check(lambda: embedded(simple_rnn()), compile_args, drive)


def test_fully_masked_replica_matches_one_device():
    """The last rows of each batch have no valid step at all."""
    words, tags = padded()
    words[np.arange(ROWS) % 8 >= 4] = 0
    drive = fit(words, tags)
    check(lambda: embedded(simple_rnn()), compiled(LOGITS, 0.3), drive)


def test_masking_layer_matches_one_device():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(ROWS, STEPS, 3)).astype("float32")
    x[padded()[0] == 0] = 0.0
    y = x.sum(axis=-1, keepdims=True).cumsum(axis=1)

    def build():
        return keras.Sequential(
            [
                keras.Input((STEPS, 3)),
                layers.Masking(),
                layers.GRU(4, return_sequences=True),
                layers.TimeDistributed(layers.Dense(1)),
            ]
        )

    check(build, compiled(), fit_evaluate_predict(x, y))


# State that is carried between batches --------------------------------------


def stateful(layer, rows=8):
    return keras.Sequential(
        [
            keras.Input(batch_shape=(rows, 5, 3)),
            layer(3, stateful=True, name="recurrent"),
            layers.Dense(1),
        ]
    )


@pytest.mark.parametrize(
    ("layer", "rows"), [(layers.LSTM, 8), (layers.LSTM, 6), (layers.GRU, 8)]
)
def test_stateful_rnn_matches_one_device(layer, rows):
    """Row i continues row i of the batch before: 24 rows are whole batches."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(24, 5, 3)).astype("float32")
    y = x.sum(axis=(1, 2))[:, None].cumsum(axis=0)
    train = fit_evaluate_predict(x, y, batch_size=rows, test_batch_size=rows)

    def drive(model):
        result = train(model)
        states = [to_numpy(v) for v in model.get_layer("recurrent").states]
        model.get_layer("recurrent").reset_state()
        again = model.predict(x[:rows], batch_size=rows, verbose=0)
        return result | {"states": states, "after_reset": again}

    check(lambda: stateful(layer, rows), compiled(learning_rate=0.01), drive)


def test_stateful_rnn_reset_by_a_callback_matches_one_device():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(16, 5, 3)).astype("float32")
    y = x.sum(axis=(1, 2))[:, None]

    class Reset(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.get_layer("recurrent").reset_state()

    def drive(model):
        return model.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[Reset()],
        ).history

    check(lambda: stateful(layers.LSTM), compiled(learning_rate=0.05), drive)
