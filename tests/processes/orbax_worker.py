"""A worker that saves with Orbax, goes on, and resumes from what it saved."""

import contextlib
import pathlib
import sys

import cluster
import keras
import orbax.checkpoint as ocp
import training

import keras_mirror as km

folder = pathlib.Path(sys.argv[1])
strategy = km.MultiWorkerMirroredStrategy(heartbeat_seconds=15)
km.set_strategy(strategy)
me = strategy.worker_index
X, Y = training.X[:24], training.Y[:24]


def functional():
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    return training.compiled(training.functional())


def fit(model, epochs=1, **options):
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def callback(save_on_background):
    path = folder / f"callback_{save_on_background}"
    saving = keras.callbacks.OrbaxCheckpoint(
        str(path), save_on_background=save_on_background
    )
    fit(functional(), epochs=2, callbacks=[saving])
    with strategy.scope() if save_on_background else contextlib.nullcontext():
        model = keras.models.load_model(path)
    restored = model.get_weights()
    fit(model)
    return {"restored": restored, "resumed": model.get_weights()}


def own_checkpointer():
    """As docs/multi_worker.md has it."""
    model = functional()
    fit(model, epochs=2)
    state = model.get_state_tree(value_format="numpy_array")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "own", state)
    fit(model)  # not what was saved
    with ocp.StandardCheckpointer() as checkpointer:
        model.set_state_tree(checkpointer.restore(folder / "own", state))
    restored = model.get_weights()
    fit(model)
    return {"restored": restored, "resumed": model.get_weights()}


def saved_by_one_device():
    model = functional()
    model.load_weights(folder / "one_device")
    return {"restored": model.get_weights()}


PROGRAMS = {
    "saved by one device": saved_by_one_device,
    "callback": lambda: callback(False),
    "callback in the background": lambda: callback(True),
    "a checkpointer of one's own": own_checkpointer,
}
found = {}
for name in sys.argv[2:] or PROGRAMS:
    found[name] = PROGRAMS[name]()
cluster.save(folder, me, found)
