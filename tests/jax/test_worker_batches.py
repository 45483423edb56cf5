"""What workers make of what they tell each other before a step."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import sparse
from parity import mirrored

from keras_mirror import _context, errors
from keras_mirror._engine import Part, TrainingStopped
from keras_mirror._jax import processes
from keras_mirror._jax.worker_batches import WorkerBatches

BATCH = np.ones((4, 2), "float32")


def other(shapes=((4, 2), "float32"), *, checksum=None, leaves=False, stops=False):
    """What another worker says."""
    return lambda mine: [
        shapes if shapes is None else [shapes],
        mine[1] if checksum is None else checksum,
        leaves,
        stops,
        [],  # it has set no variables
    ]


def take(monkeypatch, said, *, data=BATCH, is_first=True, model=None):
    """One batch of worker 0, where worker 1 says `said`."""
    monkeypatch.setattr(processes, "exchange", lambda own, what: [own, said(own)])
    batches = WorkerBatches(mirrored().mesh, "to train on", model)
    source = iter([] if data is None else [data])
    return batches.take(source.__next__, None, nth=1, is_first=is_first)


def test_a_batch_that_all_have_is_taken(monkeypatch):
    assert take(monkeypatch, other()) is BATCH


def test_the_end_comes_where_no_worker_has_more(monkeypatch):
    with pytest.raises(StopIteration):
        take(monkeypatch, other(None), data=None)


@pytest.mark.parametrize(
    ("said", "data"),
    [(other(None), BATCH), (other(), None), (other(((3, 2), "float32")), BATCH)],
    ids=["it has no more", "this one has no more", "other rows"],
)
def test_batches_that_do_not_fit_together_are_refused(monkeypatch, said, data):
    with pytest.raises(errors.WorkersDifferError, match="rows"):
        take(monkeypatch, said, data=data)


def test_workers_that_shuffle_apart_are_warned(monkeypatch):
    with pytest.warns(errors.DifferentBatchesWarning, match="1"):
        assert take(monkeypatch, other(checksum=1)) is BATCH


def test_all_leave_between_two_calls_of_training(monkeypatch):
    model, leaving = keras.Sequential(), other(leaves=True)
    with pytest.raises(errors.PreemptedExit):
        take(monkeypatch, leaving, model=model)
    # The steps of one execution are one to Keras.
    assert take(monkeypatch, leaving, model=model, is_first=False) is BATCH
    assert take(monkeypatch, leaving) is BATCH  # evaluates


def test_an_epoch_that_has_ended_is_no_place_to_leave(monkeypatch):
    said = other(None, leaves=True)
    with pytest.raises(StopIteration):
        take(monkeypatch, said, data=None, model=keras.Sequential())


def test_parts_of_other_sizes_than_asked_for_are_refused(monkeypatch):
    said = other(((8, 2), "float32"))
    monkeypatch.setattr(processes, "exchange", lambda own, what: [own, said(own)])
    batches = WorkerBatches(mirrored().mesh, "to train on")
    for part in (Part(shares_order=True), Part()):
        source = iter([{"x": BATCH, "y": np.ones(3)}])  # no common number of rows
        with pytest.raises(errors.WorkersDifferError):
            batches.take(source.__next__, part, nth=1, is_first=True)
    with pytest.raises(errors.WorkersDifferError, match="worker 1: 8 rows"):
        batches.take(
            iter([BATCH]).__next__, Part(shares_order=True), nth=1, is_first=True
        )


def test_sparse_parts_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "exchange", lambda own, what: [own, own])
    batches = WorkerBatches(mirrored().mesh, "to train on")
    source = iter([sparse.BCOO.fromdense(jnp.ones((4, 2)))])
    with pytest.raises(errors.IncompatibleOptionsError, match="sparse"):
        batches.take(source.__next__, Part(keeps_rows=True), nth=1, is_first=True)


@pytest.mark.parametrize("data", [BATCH, None], ids=["more", "no more"])
def test_what_stops_one_stops_all(monkeypatch, data):
    model = keras.Sequential()
    with pytest.raises(TrainingStopped):
        take(monkeypatch, other(None, stops=True), data=data, model=model)
    assert model.stop_training


def test_a_stop_of_this_worker_is_told(monkeypatch):
    model = keras.Sequential()
    _context.hold_stop(model)
    with pytest.raises(TrainingStopped):
        take(monkeypatch, other(), model=model)
    assert take(monkeypatch, other(), model=model) is BATCH
