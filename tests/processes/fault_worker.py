"""A worker in trouble: what it does is named on the command line."""

import os
import pathlib
import signal
import sys
import time

import cluster
import keras
import network
import numpy as np
import training

import keras_mirror as km
from keras_mirror._jax import processes

folder, name, *more = sys.argv[1:]


def make(**options):
    """The strategy: mirrored, or with weights of which each worker has a part."""
    if "SERVERS" not in os.environ:
        return km.MultiWorkerMirroredStrategy(**options)
    options |= {"shard": "parameters", "min_shard_elements": 8}
    return km.ParameterServerStrategy(**options)


strategy = make(heartbeat_seconds=int(os.environ.get("HEARTBEAT", "10")))
me = strategy.worker_index
X, Y = training.X[:24], training.Y[:24]
keras.utils.set_random_seed(7)


def model(**options):
    return training.compiled(training.mlp(), distribution=strategy, **options)


def fit(built, *, epochs=200, **options):
    options = {"batch_size": 8, "verbose": 0} | options
    return built.fit(X, Y, epochs=epochs, **options)


class At(keras.callbacks.Callback):
    """Calls a function on one worker at the end of a batch or an epoch."""

    def __init__(self, worker, function, *, epoch=2, batch=None):
        super().__init__()
        self.here, self.function = worker == me, function
        self.epoch, self.batch, self.now = epoch, batch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.here and (self.now, batch) == (self.epoch, self.batch):
            self.function(self.model)

    def on_epoch_end(self, epoch, logs=None):
        if self.here and self.batch is None and epoch == self.epoch:
            self.function(self.model)


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def raise_(_):
    raise ValueError("the disk is full")


def stop(model):
    model.stop_training = True


def killed():
    fit(model(), callbacks=[At(int(more[0]), kill)])


def raises():
    fit(model(), callbacks=[At(1, raise_)])


def raises_outside():
    """Worker 1 raises between two calls of Keras."""
    built = model()
    fit(built, epochs=1)
    if me == 1:
        raise_(built)
    fit(built, epochs=1)


def leaves():
    """Worker 1 ends in the middle, as a program may that is done."""
    fit(model(), callbacks=[At(1, lambda _: sys.exit(3), batch=1)])


def works_on():
    """The chief has work of its own after training, for longer than a heartbeat."""
    fit(model(), epochs=1)
    if me == 0:
        time.sleep(8)
    return {}


def ends_early():
    """Worker 0 ends where worker 1 trains on."""
    built = model()
    fit(built, epochs=1)
    if me == 1:
        fit(built, epochs=1)


def calls_others():
    """Worker 1 makes other calls than the chief; both go on together."""
    built, heard = model(), {}
    calls = {
        "predict": (lambda: built.predict(X), lambda: built.evaluate(X, Y)),
        "compile": (lambda: fit(built, epochs=1), model),
    }
    for name, chief_and_other in calls.items():
        heard[name] = attempt(chief_and_other[me])
    optimizers = [keras.optimizers.SGD(0.1, momentum=0.9 - 0.1 * me), "adam"]
    for optimizer in (optimizers[0], optimizers[me]):
        other = training.mlp()

        def differ(other=other, optimizer=optimizer):
            other.compile(optimizer, "mse", distribution=strategy)
            fit(other, epochs=1)

        heard[f"optimizer {len(heard)}"] = attempt(differ)
    fit(built, epochs=1)
    return {"heard": heard, "weights": built.get_weights()}


def stops_at_epoch():
    history = fit(model(), callbacks=[At(1, stop)])
    return {"epochs": len(history.epoch)}


def stops_at_batch():
    built = model()
    fit(built, epochs=5, callbacks=[At(1, stop, epoch=1, batch=1)])
    iterations = int(built.optimizer.iterations)
    return {"iterations": iterations, "weights": built.get_weights()}


def other_batches():
    """Worker 1 has other data than the others."""
    rows = slice(0, 24 if me == 0 else 20)
    model().fit(X[rows], Y[rows], batch_size=8, epochs=3, verbose=0)


def generator_fails():
    def source():
        for step in range(20):
            if me == 1 and step == 3:
                raise OSError("no such shard")
            yield X[:8], Y[:8]

    model().fit(source(), steps_per_epoch=20, shuffle=False, verbose=0)


def writes():
    """Every callback that writes, with one path for all workers."""
    path = pathlib.Path(folder) / "files"
    path.mkdir(exist_ok=True)
    built = model()
    written = []
    # Whoever opens a file for writing is heard of.
    sys.addaudithook(
        lambda event, args: (
            written.append(str(args[0]))
            if event == "open"
            and str(args[0]).startswith(str(path))
            and str(args[1]).startswith(("w", "a", "x"))
            else None
        )
    )
    fit(
        built,
        epochs=3,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path / "best.keras", save_best_only=True),
            keras.callbacks.BackupAndRestore(path / "backup", delete_checkpoint=False),
            keras.callbacks.CSVLogger(path / "log.csv"),
            keras.callbacks.TensorBoard(path / "board"),
            keras.callbacks.EarlyStopping(monitor="loss", patience=1),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0),
        ],
    )
    built.save(path / "last.keras")
    built.save_weights(path / "last.weights.h5")
    return {"written": written, "weights": built.get_weights()}


def late():
    """Worker 1 does something else for a while."""
    processes.LATE_SECONDS = 3.0
    built = model()
    if me == 1:
        time.sleep(8)
    fit(built)


def hangs():
    """Worker 1 is stopped, and gives no sign of life."""
    stop_here = lambda _: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
    fit(model(), callbacks=[At(1, stop_here)])


def goes_on():
    """Trains for ever, and says when it does."""
    begun = lambda _: (pathlib.Path(folder) / "trains").touch()  # noqa: E731
    fit(model(), epochs=10**6, callbacks=[At(1, begun)])


def cut_off(_):
    network.cut_off()
    (pathlib.Path(folder) / "cut").touch()


def deaf():
    """Nothing that other workers send reaches this one any more."""
    fit(model(), epochs=10**6, callbacks=[At(int(more[0]), cut_off)])


def other_model():
    """Worker 1 builds another model."""
    units = 1 if me == 0 else 2
    layers = [keras.Input((6,)), keras.layers.Dense(units)]
    training.compiled(keras.Sequential(layers), distribution=strategy)


def own_parts():
    """auto_shard="off": each worker brings its own rows, not equally many."""
    own = slice(0, 15) if me == 0 else slice(15, 24)

    def source():
        yield X[own][:6], Y[own][:6]
        yield X[own][6:], Y[own][6:]

    built = model()
    built.fit(source(), epochs=1, shuffle=False, verbose=0)
    predicted = built.predict(X[own], verbose=0)
    return {"weights": built.get_weights(), "predicted": predicted}


def terminate(_):
    os.kill(os.getpid(), signal.SIGTERM)


def breaks_off(end, save_freq="epoch", folder_of="all", batch=1):
    """Worker 1 ends in the third epoch of its first start."""
    path = pathlib.Path(folder)

    def note(batch, logs):
        with open(path / f"batches{me}", "a") as log:
            print(batch, file=log)

    write = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    backup = keras.callbacks.BackupAndRestore(
        path / f"backup of {folder_of}", save_freq=save_freq
    )
    callbacks = [backup, write]
    first = path / "started"
    if end is not None and me == 1 and not first.exists():
        first.touch()
        callbacks.append(At(1, end, epoch=2, batch=batch))
    whole = make(view="global")  # masks of one device
    built = training.with_dropout(distribution=whole)
    history = fit(built, epochs=5, callbacks=callbacks)
    last = {name: values[-3:] for name, values in history.history.items()}
    return {"weights": built.get_weights(), "history": last}


def preempted():
    return breaks_off(terminate)


def zeros(model):
    model.set_weights([0 * weight for weight in model.get_weights()])


def set_and_set_back(model):
    weights = model.get_weights()
    zeros(model)
    model.set_weights(weights)


def set_rate(model):
    model.optimizer.learning_rate = 0.01 * (me + 1)


def attempt(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class On(keras.callbacks.Callback):
    """Calls a function on worker 1, in one method."""

    def __init__(self, name, function):
        super().__init__()
        if me == 1:
            setattr(self, name, lambda *_, **__: function(self.model))


class OwnStep(keras.Sequential):
    is_fitted = False  # Keras builds it before

    def compute_loss(self, *args, **options):
        if me == 1 and self.is_fitted:
            raise OSError("no such shard")
        return super().compute_loss(*args, **options)


def validation():
    for step in range(3):
        if me == 1 and step == 2:  # Keras looks at two before
            raise OSError("no such shard")
        yield X[:8], Y[:8]


def forked_and_ended(_=None):
    """The signal that ends a forked child which was sent SIGTERM."""
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def errors_of_one():
    """Errors of worker 1 that both catch: what each heard, and whether they fit on."""
    ended = [forked_and_ended()]
    built, wrong = model(), {"sample_wight": 1} if me == 1 else {}
    own_step = training.compiled(OwnStep(training.mlp().layers), distribution=strategy)
    begun = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: setattr(own_step, "is_fitted", True)
    )
    rows = 24 if me == 0 else 16
    other_loss = model()
    other_loss.compile("sgd", "mse" if me == 0 else "mae", distribution=strategy)
    by_hand = model(run_eagerly=me == 1)
    alone = [km.ConsistencyCheck(every_steps=1)] if me == 0 else []
    kind = "float32" if me == 0 else "int32"
    batches = [(X[:8].astype(kind), Y[:8])] * 3
    heard = {
        "argument": attempt(lambda: fit(built, epochs=1, **wrong)),
        "tracing": attempt(lambda: fit(own_step, epochs=1, callbacks=[begun])),
        "validation": attempt(
            lambda: fit(
                built, epochs=1, validation_data=validation(), validation_steps=3
            )
        ),
        "rows": attempt(lambda: built.fit(X[:rows], Y[:rows], batch_size=8, verbose=0)),
        "evaluate": attempt(lambda: built.evaluate(X[:rows], Y[:rows], batch_size=8)),
        "predict": attempt(lambda: built.predict(X[:rows], batch_size=8)),
        "steps": attempt(lambda: fit(other_loss, epochs=1)),
        "run_eagerly": attempt(lambda: fit(by_hand, epochs=1)),
        "weights": attempt(
            lambda: fit(built, epochs=3, callbacks=[At(1, zeros, epoch=1)])
        ),
        "a weight": attempt(
            lambda: fit(built, epochs=3, callbacks=[At(0, zeros, batch=1)])
        ),
        "rates": attempt(lambda: fit(built, epochs=3, callbacks=[At(me, set_rate)])),
        "callbacks": attempt(lambda: fit(built, epochs=1, callbacks=alone)),
        "dtypes": attempt(lambda: built.fit((b for b in batches), verbose=0)),
    }
    for name in ("on_train_begin", "on_epoch_end", "on_train_end"):
        raises = [On(name, raise_)]
        heard[name] = attempt(lambda r=raises: fit(built, epochs=1, callbacks=r))
    note = lambda _: ended.append(forked_and_ended())  # noqa: E731
    fit(built, epochs=1, callbacks=[At(me, note, epoch=0)])
    stopped = {}
    for name in ("on_train_begin", "on_epoch_begin", "on_train_batch_begin"):
        before = int(built.optimizer.iterations)
        fit(built, epochs=3, callbacks=[On(name, stop)])
        stopped[name] = int(built.optimizer.iterations) - before
    fit(built, epochs=3, callbacks=[At(1, set_and_set_back, epoch=1)])
    fit(built, epochs=1)
    weights = built.get_weights()
    return {"heard": heard, "stopped": stopped, "ended": ended, "weights": weights}


def drifts():
    """Worker 1 assigns to a weight alone."""
    built = model()
    km.check_consistency(built)

    def drift(model):
        bias = model.layers[0].bias
        bias.assign(bias + 1e-6)

    check = km.ConsistencyCheck(every_steps=3)
    fit(built, epochs=1, callbacks=[At(1, drift, epoch=0, batch=2), check])


def killed_between_backups():
    return breaks_off(kill)


def killed_after_a_backup():
    """On hosts that share no files: the chief alone finds a backup."""
    return breaks_off(kill, save_freq=1, folder_of=me)


def killed_at_epoch_end():
    """All batches of the epoch are in the backup; its end and the rest are not."""
    return breaks_off(kill, save_freq=1, batch=None)


def killed_while_saving():
    """The chief dies with the new backup written and not yet in its place."""
    first, places = pathlib.Path(folder) / "started", []
    replace = os.replace

    def replace_or_die(*paths):
        places.append(paths)
        if len(places) == 8 and not first.exists():
            first.touch()
            kill(None)
        replace(*paths)

    if me == 0:
        os.replace = replace_or_die
    return breaks_off(None, save_freq=1)


def asked_at_the_end():
    """SIGTERM comes to worker 1 after its last batch."""
    fit(model(), epochs=1, callbacks=[At(1, terminate, epoch=0, batch=2)])
    time.sleep(0.5)
    return {}


if name == "own_parts":
    strategy = km.MultiWorkerMirroredStrategy(auto_shard="off")
result = globals()[name]()
cluster.save(folder, me, result)
np.testing.assert_equal(me, strategy.worker_index)
