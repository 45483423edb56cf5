"""Programs whose workers read parts of the data, and what one device makes of them."""

import pathlib
import random
import tempfile
import traceback
import warnings

import keras
import numpy as np
import training
from training import X, Y

import keras_mirror as km
from keras_mirror import errors


class Parted(keras.utils.PyDataset):
    """Batches of `rows`, or parts of them; `read` gets the rows that are computed."""

    def __init__(self, rows, read, **options):
        super().__init__(**options)
        self.rows, self.read = rows, read

    def __len__(self):
        return -(-len(self.rows) // 8)

    def __getitem__(self, i):
        return self.get_part(i, 0, 1)

    def get_part(self, index, part, num_parts):
        batch = list(self.rows)[index * 8 : (index + 1) * 8]
        n = len(batch)
        own = batch[part * n // num_parts : (part + 1) * n // num_parts]
        self.read += own
        if part:
            random.random()  # as augmentation would: the workers draw unequally often
        return X[own], Y[own]


def loader(batch_size, read, **options):
    """A torch DataLoader; `read` gets the number of each row that is fetched."""
    import torch

    class Recorded(torch.utils.data.Dataset):
        def __len__(self):
            return 26

        def __getitem__(self, i):
            read.append(i)
            return X[i], Y[i]

    return torch.utils.data.DataLoader(Recorded(), batch_size=batch_size, **options)


class Steps(keras.utils.PyDataset):
    """Global batches by the numbers of their rows."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, i):
        return X[self.steps[i]], Y[self.steps[i]]


def used(model, data, own=None, *, shuffle=False):
    """fit, evaluate and predict; `own`: the rows that predict is to return."""
    options = {"shuffle": shuffle, "epochs": 2, "verbose": 0}
    history = model.fit(data(), validation_data=data(), **options).history
    rows = data() if own is None else X[own]
    return {
        "history": history,
        "evaluate": model.evaluate(data(), verbose=0),
        "predict": model.predict(rows, verbose=0),
        "weights": model.get_weights(),
    }


def files(counts):
    """One file for each count, with so many rows; one pipeline over them."""
    import tensorflow as tf

    folder, row = pathlib.Path(tempfile.mkdtemp()), 0
    paths = [str(folder / f"{number}.tfrecord") for number in range(len(counts))]
    for path, count in zip(paths, counts, strict=True):
        with tf.io.TFRecordWriter(path) as writer:
            for x, y in zip(X[row : row + count], Y[row : row + count], strict=True):
                writer.write(np.concatenate([x, y]).tobytes())
        row += count

    def parse(record):
        values = tf.reshape(tf.io.decode_raw(record, tf.float32), (7,))
        return values[:6], values[6:]

    return tf.data.TFRecordDataset(paths).map(parse)


def own_rows(counts, worker, workers):
    starts = np.cumsum([0, *counts])
    shared = range(worker, len(counts), workers)
    return [row for i in shared for row in range(starts[i], starts[i + 1])]


def steps(counts, pieces):
    """The global batches: of worker k so many rows a step, in turn, as `pieces[k]`."""
    left = [own_rows(counts, k, len(pieces)) for k in range(len(pieces))]
    found = []
    while any(left):
        turn, step = len(found), []
        for k, sizes in enumerate(pieces):
            size = sizes[turn % len(sizes)]
            step += left[k][:size]
            left[k] = left[k][size:]
        found.append(step)
    return found


def batches(counts, rows):
    return lambda: files(counts).batch(rows)


def known_number(counts, rows):
    """Batches of which tf.data knows how many there are."""
    import tensorflow as tf

    number = -(-sum(counts) // rows)
    known = tf.data.experimental.assert_cardinality(number)
    return lambda: files(counts).batch(rows).apply(known)


def of_unknown_size(counts, rows):
    """Batches whose size tf.data cannot tell."""
    import tensorflow as tf

    def same(x, y):
        return tf.concat([x[:1], x[1:]], 0), tf.concat([y[:1], y[1:]], 0)

    return lambda: files(counts).batch(rows).map(same)


# Of two workers: rows of each file, the pipeline, rows of each worker in its steps.
FILES = {
    "even": ([8, 8, 8], lambda c: batches(c, 8), [[4, 4], [4, 4]]),
    "uneven": ([5, 4, 7, 2], lambda c: batches(c, 5), [[2, 3], [3, 2]]),
    "one worker without rows": ([9, 0], lambda c: batches(c, 4), [[2, 2], [2, 2]]),
    "fewer rows than workers": ([2, 3], lambda c: batches(c, 1), [[0, 1], [1, 0]]),
    "known number": ([9, 3], lambda c: known_number(c, 4), [[2, 2], [2, 2]]),
    "unknown size": ([8, 4], lambda c: of_unknown_size(c, 4), [[2, 2], [2, 2]]),
}
# The last batch has one row: less than the workers.
PARTED = {
    "PyDataset": lambda read: Parted(range(25), read),
    "PyDataset with threads": lambda read: Parted(range(25), read, workers=2),
    "torch": lambda read: loader(5, read),
    "shuffled torch": lambda read: loader(8, read, shuffle=True),
}
REFUSED = {
    "arrays": (lambda: X, "data of type ndarray"),
    "no files": (lambda: training.tf_data(), "a dataset that reads no files"),
    "too few files": (batches([9], 4), "the dataset only has 1 file(s)"),
}


def refused(model, data):
    try:
        model.predict(data(), verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def set_seeds(seed):
    import torch

    keras.utils.set_random_seed(seed)
    torch.manual_seed(seed)


def parted(fresh):
    """Each form of data of which a worker reads its part alone."""
    found = {}
    for name, data in PARTED.items():
        shuffle = name.startswith("PyDataset")
        make = lambda data=data: data([])  # noqa: E731
        found[f"parts: {name}"] = _attempted(used, fresh(), make, shuffle=shuffle)
        read = []
        fresh().predict(data(read), verbose=0)
        found[f"rows read: {name}"] = sorted(read)
    return found


def warned(model, seed):
    """How often a fit of two epochs, with validation, warns of other batches."""
    keras.utils.set_random_seed(seed)
    data = training.tf_data().unbatch().shuffle(26).batch(training.BATCH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"shuffle": False, "epochs": 2, "verbose": 0}
        model.fit(data, validation_data=data, **options)
    return [w.category for w in caught].count(errors.DifferentBatchesWarning)


def on_worker(worker):
    """Every program on this worker."""
    fresh = training.Fresh()
    set_seeds(20 + worker)
    found = parted(fresh)
    found["warned"] = [_attempted(warned, fresh(), seed) for seed in (worker, 3)]
    km.set_strategy(km.MultiWorkerMirroredStrategy(auto_shard="file"))
    fresh = training.Fresh()
    for name, (counts, data, _) in FILES.items():
        found[f"files: {name}"] = _attempted(used, fresh(), data(counts))
    for name, (data, _) in REFUSED.items():
        found[f"refused: {name}"] = refused(fresh(), data)
    return found


def on_one_device():
    """The same over the global batches of two workers."""
    fresh = training.Fresh()
    set_seeds(20)
    found = parted(fresh)
    for name, (counts, _, pieces) in FILES.items():
        data = Steps(steps(counts, pieces))
        made = used(fresh(), lambda data=data: data, own=range(26))
        own = [made["predict"][own_rows(counts, k, 2)] for k in range(2)]
        found[f"files: {name}"] = made | {"predict": own}
    return found


def _attempted(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception:
        return traceback.format_exc()
