"""What a step costs: transfers, memory and collectives, seen in what JAX holds."""

import gc
import re

import jax
import keras
import numpy as np
import pytest
from parity import mirrored

from keras_mirror import _context
from keras_mirror._engine import load
from keras_mirror._jax import batch, report

ROWS, FEATURES = 40, 23  # shapes that no variable has
rng = np.random.default_rng(1)
X = rng.normal(size=(ROWS, FEATURES)).astype("float32")
Y = rng.integers(0, 3, ROWS)


def model(**options):
    built = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    built.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        distribution=mirrored(),
        **options,
    )
    return built


def whole_batches():
    """Live arrays that hold a whole batch on one device."""
    return [
        array
        for array in jax.live_arrays()
        if array.shape in ((ROWS, FEATURES), (ROWS,))
        and any(s.data.shape == array.shape for s in array.addressable_shards)
    ]


class Looks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def look(self, batch, logs=None):
        self.found += whole_batches()

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = look


@pytest.mark.parametrize("form", ["numpy", "generator"])
def test_each_device_receives_only_its_rows(form):
    def generator():
        while True:
            yield X, Y

    looks = Looks()
    built = model()
    if form == "numpy":
        built.fit(X, Y, batch_size=ROWS, callbacks=[looks], verbose=0)
        built.evaluate(X, Y, batch_size=ROWS, callbacks=[looks], verbose=0)
        built.predict(X, batch_size=ROWS, callbacks=[looks], verbose=0)
    else:
        options = {"steps_per_epoch": 2, "shuffle": False, "verbose": 0}
        built.fit(generator(), callbacks=[looks], **options)
    assert not looks.found


def parameters(program):
    """Shapes of the arguments of a compiled program, as one device gets them."""
    entry = program[program.index("\nENTRY") :]
    return re.findall(r"= (\w+\[[\d,]*\])\S* parameter\(", entry)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1], ids=["even", "tail"])
@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_a_compiled_step_takes_its_batch_by_rows(kind, rows):
    built = model()
    data = (X[:rows],) if kind == "predict" else (X[:rows], Y[:rows])
    getattr(built, f"{kind}_on_batch")(*data)
    step = getattr(built, f"{kind}_function").step
    ready = batch.prepare(data, step.strategy.mesh)
    groups = _context.internals().state_variables(
        built, {"train": 4, "test": 3, "predict": 2}[kind]
    )
    state = tuple([v.value for v in group] for group in groups)
    programs = [step.global_jit(ready).lower(state, ready.data, ready.rows)]
    if kind == "train" and rows == ROWS:
        programs.append(step.replica_jit.lower(state, ready.data))
    for lowered in programs:
        taken = parameters(lowered.compile().as_text())
        assert f"f32[10,{FEATURES}]" in taken
        assert f"f32[{ROWS},{FEATURES}]" not in taken


def test_calls_on_a_batch_put_no_whole_batch_on_a_device(monkeypatch):
    put, whole = jax.device_put, []

    def device_put(value, device=None, **options):
        placed = put(value, device, **options)
        for array in jax.tree.leaves(placed):
            if np.shape(array)[:1] == (ROWS,):
                whole.extend(
                    s for s in array.addressable_shards if s.data.shape[0] == ROWS
                )
        return placed

    built = model()
    monkeypatch.setattr(jax, "device_put", device_put)
    built.train_on_batch(X, Y)
    built.test_on_batch(X, Y)
    built.predict_on_batch(X)
    assert not whole


def test_a_padded_batch_is_divided_over_the_devices():
    placed = batch.prepare((X[:38], Y[:38], None), mirrored().mesh)
    assert placed.rows == 38 and not placed.is_even
    for leaf in jax.tree.leaves(placed.data):
        assert [s.data.shape[0] for s in leaf.addressable_shards] == [10] * 4


def test_state_is_donated_and_held_once():
    built = model()
    built.train_on_batch(X, Y)
    before = [v.value for v in built.variables + built.optimizer.variables]
    built.train_on_batch(X, Y)
    kept = [a for a in before if not a.is_deleted() and a.size > 1]
    assert not kept
    del before
    gc.collect()  # what the tests before have left
    kernels = [a for a in jax.live_arrays() if a.shape == (FEATURES, 8)]
    assert len(kernels) == 3  # the kernel and Adam's two slots


def test_a_step_has_at_most_two_all_reduces():
    found = load().step_report(model(), X, Y)
    assert found.view == "replica"
    assert 1 <= found.collectives <= 2


def test_bytes_sent_are_those_of_a_ring_all_reduce():
    built = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    built.compile("sgd", "mse", distribution=mirrored())
    found = load().step_report(built, X, np.zeros((ROWS, 3), "float32"))
    floats = FEATURES * 3 + 3 + 1  # gradients and the loss
    assert found.bytes_sent == round(2 * 3 / 4 * 4 * floats)


def test_collectives_are_counted_from_the_program():
    program = """
    %a = (f32[2,3]{1,0}, s32[]) all-reduce(%x, %y), replica_groups={{0,1,2,3}}
    %b = bf16[8]{0} all-gather(%z), dimensions={0}
    %c = f32[4]{0} add(%a, %b)
    """
    sent = 2 * 3 / 4 * (6 * 4 + 4) + 3 / 4 * 16
    assert report.count(program, 4) == (2, round(sent))


@pytest.mark.parametrize(
    "groups", ["{{0,1},{2,3}}", "[2,2]<=[4]", "mesh['a'=2,'b'=2] {'b'}"]
)
def test_bytes_are_those_of_the_groups_that_reduce(groups):
    program = f"%a = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%f\n"
    assert report.count(program, 4) == (1, 8 * 4)


def test_an_accelerator_gets_the_next_batch_ahead_of_the_step(monkeypatch):
    asked = []

    def source():
        for i in range(3):
            asked.append(i)
            yield (X + i,)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ahead = batch.Batches(source(), mirrored().mesh, may_be_reused=False)
    first = next(ahead)
    assert asked == [0, 1]
    np.testing.assert_array_equal(first[0], X)
    assert len(list(ahead)) == 2


def test_workers_get_their_batches_as_they_lie_on_the_host(monkeypatch):
    """They agree on a batch before any of it is placed."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(batch, "spans_processes", lambda mesh: True)
    batches = batch.Batches(iter([(X,)]), mirrored().mesh, may_be_reused=False)
    assert batches.take()[0] is X


def aligned(rows, columns):
    """An array that JAX may take as it is, without a copy."""
    memory = np.empty(rows * columns * 4 + 64, "uint8")
    start = -memory.ctypes.data % 64
    return memory[start : start + rows * columns * 4].view("float32").reshape(rows, -1)


@pytest.mark.parametrize("rows", [4, 5])
def test_a_source_may_fill_one_buffer_again_and_again(rows):
    buffer = aligned(rows, 1024)

    def source():
        for i in range(4):
            buffer[:] = i
            yield (buffer,)

    found = list(batch.Batches(source(), mirrored().mesh, may_be_reused=True))
    for i, (x,) in enumerate(found):
        np.testing.assert_array_equal(np.asarray(x), np.full((rows, 1024), i))


def test_fit_trains_even_batches_in_the_replica_view():
    built = model()
    built.fit(X, Y, batch_size=16, epochs=2, verbose=0)  # 16, 16 and a tail of 8
    built.fit(X, Y, batch_size=15, verbose=0)  # 15, 15, 10
    assert built.train_function.step.views == {"replica": 6, "global": 3}


def test_on_cpu_no_batch_is_asked_for_before_its_turn():
    asked = []

    def source():
        for i in range(3):
            asked.append(i)
            yield (X + i,)

    next(batch.Batches(source(), mirrored().mesh, may_be_reused=False))
    assert asked == [0]
