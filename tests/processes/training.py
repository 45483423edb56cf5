"""Programs that workers and one device run alike, by name."""

import functools
import itertools

import keras
import numpy as np
from keras import layers

import keras_mirror as km

ROWS, BATCH, VALIDATION = 26, 8, 7
_rng = np.random.default_rng(4)
X = _rng.normal(size=(ROWS, 6)).astype("float32")
Y = (np.tanh(X @ _rng.normal(size=(6, 1))) + np.linspace(-1, 1, ROWS)[:, None]).astype(
    "float32"
)
WEIGHTS = np.linspace(0.2, 2.0, ROWS).astype("float32")


def mlp():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)]
    )


def functional():
    """Keras reads an Orbax checkpoint by path; a Sequential's paths change."""
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(8, "tanh")(inputs)))


def compiled(model, **more):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae", "root_mean_squared_error"], **more)
    return model


class Fresh:
    """One model, compiled once, as it was before it was trained."""

    def __init__(self):
        keras.utils.set_random_seed(7)
        self.model = compiled(mlp())
        self.model.optimizer.build(self.model.trainable_variables)
        self.start = [np.array(value) for value in self._variables()]

    def _variables(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def __call__(self):
        for variable, value in zip(self._variables(), self.start, strict=True):
            variable.assign(value)
        return self.model


def with_dropout(**more):
    """Draws numbers at each step: it must go on with the next ones."""
    dropout = layers.Dropout(0.3, seed=5)
    stack = [keras.Input((6,)), layers.Dense(8, "tanh"), dropout, layers.Dense(1)]
    return compiled(keras.Sequential(stack), **more)


def used(model, data, **options):
    """fit, evaluate and predict, and all that they leave behind."""
    history = model.fit(**data(), epochs=2, verbose=0, **options).history
    evaluated = model.evaluate(X, Y, batch_size=VALIDATION, verbose=0)
    return {
        "history": history,
        "evaluate": evaluated,
        "predict": model.predict(X, batch_size=BATCH, verbose=0),
        "weights": model.get_weights(),
        "slots": [np.asarray(v) for v in model.optimizer.variables],
    }


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, i):
        part = slice(i * BATCH, (i + 1) * BATCH)
        return X[part], Y[part], WEIGHTS[part]


def batches():
    for start in range(0, ROWS, BATCH):
        part = slice(start, start + BATCH)
        yield X[part], Y[part]


def endless():
    yield from itertools.cycle(batches())


def tf_data(unknown_length=False):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    if unknown_length:
        dataset = dataset.filter(lambda x, y: True)
    return dataset.batch(BATCH)


def torch_loader():
    import torch

    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def grain_data():
    import grain

    rows = [{"x": a, "y": b} for a, b in zip(X, Y, strict=True)]
    dataset = grain.MapDataset.source(rows).map(lambda row: (row["x"], row["y"]))
    return dataset.to_iter_dataset().batch(BATCH)


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False},
    "shuffled": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "weighted": lambda: {
        "x": X,
        "y": Y,
        "sample_weight": WEIGHTS,
        "batch_size": BATCH,
        "validation_split": 0.2,
    },
    "one row": lambda: {"x": X[:9], "y": Y[:9], "batch_size": 4},
    "jax": lambda: {
        "x": keras.ops.convert_to_tensor(X),
        "y": keras.ops.convert_to_tensor(Y),
        "batch_size": BATCH,
    },
    "tf.data": lambda: {"x": tf_data()},
    "unknown length": lambda: {"x": tf_data(unknown_length=True)},
    "PyDataset": lambda: {"x": Rows(), "shuffle": True},
    "PyDataset workers": lambda: {"x": Rows(workers=2), "shuffle": False},
    "generator": lambda: {"x": endless(), "steps_per_epoch": 5},
    "torch": lambda: {"x": torch_loader()},
    "Grain": lambda: {"x": grain_data()},
}


@functools.cache
def _fresh(strategy):
    fresh = Fresh()
    # Makes the metrics: a fit that has to, goes through the data once more.
    fresh.model.test_on_batch(X[:BATCH], Y[:BATCH])
    return fresh


def trained(data):
    """One model for all forms of data: it is compiled once."""
    options = {"validation_data": (X[:VALIDATION], Y[:VALIDATION])}
    if "validation_split" in DATA[data]():
        del options["validation_data"]
    model = _fresh(km.get_strategy())()
    keras.utils.set_random_seed(7)
    return used(model, DATA[data], **options)


def masked_sequences():
    tokens = np.arange(ROWS * 5).reshape(ROWS, 5) % 7
    tokens[::3, 3:] = 0
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(1),
        ]
    )
    compiled(model)
    y = np.repeat(Y[:, None], 5, axis=1)
    history = model.fit(tokens, y, batch_size=BATCH, epochs=2, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


def grouped_steps():
    model = compiled(mlp(), steps_per_execution=3)
    return used(model, DATA["arrays"])


def single_batches():
    model = compiled(mlp())
    found = []
    for x, y in batches():
        found.append(model.train_on_batch(x, y))
        found.append(model.test_on_batch(x, y))
    found.append(model.predict_on_batch(X[:5]))
    return {"found": found, "weights": model.get_weights()}


def own_train_step():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x) - keras.ops.mean(x)  # of the global batch

    return used(compiled(Own()), DATA["arrays"])


def unbuilt():
    model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
    return used(compiled(model), DATA["shuffled"])


class Looking(keras.Sequential):
    """Its step looks at the values."""

    def train_step(self, state, data):
        self.rows += np.asarray(data[0]).tolist()
        return super().train_step(state, data)


def eager():
    model = Looking(mlp().layers)
    model.rows = []
    found = used(compiled(model, run_eagerly=True), DATA["arrays"])
    assert model.rows == 2 * X.tolist()
    return found


class OddParts(keras.utils.PyDataset):
    """Batches of nine rows, of which a worker reads its own alone."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self.get_part(i, 0, 1)

    def get_part(self, i, part, num_parts):
        rows = slice(9 * i + part * 9 // num_parts, 9 * i + (part + 1) * 9 // num_parts)
        return X[rows], Y[rows]


def odd_parts():
    """Before each step the workers send rows, while the step before may still run."""
    model = compiled(mlp())
    model.fit(OddParts(), epochs=20, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


def large_blocks():
    """Of 4 MiB each: gloo's reduce-scatter gives wrong numbers there."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 2048)).astype("float32")
    stack = [keras.Input((2048,)), layers.Dense(1024, "tanh"), layers.Dense(4)]
    model = keras.Sequential(stack)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    for _ in range(3):
        model.train_on_batch(x, x[:, :4])
    return {"weights": model.get_weights()}


class StopsAfter(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = not self.left


class Looks(keras.callbacks.Callback):
    """Keeps the weights after each batch; of two workers each looks at every other."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_train_batch_end(self, batch, logs=None):
        strategy = km.get_strategy()
        if strategy is None or batch % 2 == strategy.worker_index:
            self.seen[batch] = self.model.get_weights()


def looks_of_one_worker():
    """What one worker alone sees between two steps is what the next one changes."""
    looks, model, again = Looks(), compiled(mlp()), compiled(mlp())
    again.set_weights(model.get_weights())
    model.fit(**DATA["arrays"](), verbose=0, callbacks=[looks])
    assert looks.seen
    for batch, (x, y) in enumerate(batches()):
        again.train_on_batch(x, y)
        if batch in looks.seen:
            for seen, weight in zip(
                looks.seen[batch], again.get_weights(), strict=True
            ):
                np.testing.assert_allclose(seen, weight, atol=1e-5)
    return {"weights": model.get_weights()}


def rate_on_one_worker():
    """What one worker's callback decides: two that stand on different workers."""
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=100),
    ]
    strategy = km.get_strategy()
    if strategy is not None:
        callbacks = callbacks[strategy.worker_index :][:1]
    model = compiled(mlp())
    options = {"callbacks": callbacks, "epochs": 4, "verbose": 0}
    model.fit(**DATA["arrays"](), **options)
    return {
        "weights": model.get_weights(),
        "rate": float(model.optimizer.learning_rate),
    }


PROGRAMS = {
    **{f"data: {name}": lambda name=name: trained(name) for name in DATA},
    "masks": masked_sequences,
    "steps_per_execution": grouped_steps,
    "on_batch": single_batches,
    "whole-batch mean": own_train_step,
    "unbuilt": unbuilt,
    "run_eagerly": eager,
    "odd parts": odd_parts,
    "large blocks": large_blocks,
    "rate on one worker": rate_on_one_worker,
    "looks of one worker": looks_of_one_worker,
}


def run(name):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    return PROGRAMS[name]()
