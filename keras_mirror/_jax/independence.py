"""Whether a model's train step may run once per replica: the question to `rows`."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_mirror import _context
from keras_mirror._jax.collectives import is_float
from keras_mirror._jax.row_rules import make_walk
from keras_mirror._jax.rows import LOSS, SEED, Label, RowsMix
from keras_mirror._seeds import is_seed

_log = logging.getLogger("keras_mirror")
ROW = Label("rows", 0, 1)


class _Recorder:
    """Takes the place of Keras' reductions over the batch, and keeps their inputs.

    The reductions themselves are exact in the replica view (`losses`), or differ
    on purpose (BatchNormalization); what enters them must be row by row.
    """

    def __init__(self, token: Any) -> None:
        self.values: list[Any] = []
        self._token = token

    def apply_mask(
        self, original: Callable[..., Any], weight: Any, mask: Any, dtype: Any, _: Any
    ) -> Any:
        return original(weight, mask, dtype, "sum")

    def reduce_values(
        self, original: Callable[..., Any], values: Any, weight: Any, reduction: Any
    ) -> Any:
        if reduction in (None, "none"):  # stays one value per row
            return original(values, weight, reduction)
        self.values += [values] if weight is None else [values, weight]
        return self._token.astype(values.dtype)

    def lookup(self, original: Any, layer: Any, ids: Any) -> Any:
        return original(layer, ids)

    def moments(self, original: Callable[..., Any], inputs: Any, mask: Any) -> Any:
        mean, variance = jax.eval_shape(original, inputs, mask)
        return jnp.zeros(mean.shape, mean.dtype), jnp.ones(
            variance.shape, variance.dtype
        )


def _forward(
    model: Any, trainable: Any, state: Any, data: Any, token: Any
) -> tuple[Any, Any]:
    """What the replica view puts together, and the states behind it."""
    non_trainable, optimizer, metrics = state
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    recorder = _Recorder(token)
    with _context.hooks(recorder):
        loss, aux = model.compute_loss_and_updates(
            trainable,
            non_trainable,
            metrics,
            x,
            y,
            sample_weight,
            training=True,
            optimizer_variables=optimizer,
        )
    unscaled_loss, y_pred, non_trainable, metrics = aux
    found = {
        "rows": [y_pred, recorder.values],
        "losses": [loss, unscaled_loss],
    }
    return found, (list(non_trainable), list(metrics))


def _traced(model: Any, state: Any, data: Any, token: Any) -> dict[str, Any]:
    """The forward pass and its derivative by the trainable variables.

    Gradients are sums over rows of what the derivative says row by row; a
    derivative that a user defined himself is thus looked at too.
    """
    trainable, *rest = state
    tangents = jax.tree.map(jnp.ones_like, trainable)
    found, derivative, (non_trainable, metrics) = jax.jvp(
        lambda values: _forward(model, values, rest, data, token),
        (trainable,),
        (tangents,),
        has_aux=True,
    )
    floats = [d for d in jax.tree.leaves(derivative["rows"]) if is_float(d)]
    return {
        "rows": found["rows"],
        "derivative": floats,
        "losses": [found["losses"], derivative["losses"]],
        "state": non_trainable,
        "metrics": metrics,
    }


def _spec(leaf: Any, rows: int | None = None) -> jax.ShapeDtypeStruct:
    shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
    # What is float64 in host memory is float32 in the step.
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _labels(model: Any, state: Any, data: Any) -> list[Label | None]:
    """What is known of the arguments of the traced function, in their order."""
    trainable, non_trainable, optimizer, metrics = state
    seeds = [
        SEED if is_seed(variable) else None
        for variable in model.non_trainable_variables
    ]
    assert len(seeds) == len(non_trainable)
    rest = [None] * (len(optimizer) + len(metrics))
    rows = [ROW] * len(jax.tree.leaves(data))
    return [None] * len(trainable) + seeds + rest + rows + [LOSS]


def _traces(
    model: Any, state: Any, data: Any, sizes: tuple[int, int]
) -> tuple[list[Any], Any]:
    """The traced function at both batch sizes, and the structure of its results."""
    state = jax.tree.map(_spec, tuple(state))
    token = jax.ShapeDtypeStruct((), "float32")  # stands for each reduced loss
    found, shapes = [], None
    for rows in sizes:
        batch = jax.tree.map(lambda leaf, rows=rows: _spec(leaf, rows), data)
        trace, shapes = jax.make_jaxpr(
            lambda *args: _traced(model, *args), return_shape=True
        )(state, batch, token)
        found.append(trace)
    return found, jax.tree.structure(shapes)


def _check(
    model: Any, labels: list[Label | None], traces: list[Any], structure: Any, rows: Any
) -> None:
    """Raises RowsMix with the reason if the replica view would not be exact."""
    small, large = traces
    found = make_walk(rows).closed(small, large, labels)
    if len(small.jaxpr.outvars) != len(large.jaxpr.outvars):
        raise RowsMix("the program depends on the batch size")
    places = structure.unflatten(range(len(found)))
    _check_results(places, found)
    _check_state(model, places["state"], small.jaxpr, found)
    _check_metrics(model, places["metrics"], small.jaxpr, found)


def _check_results(places: Any, found: list[Label | None]) -> None:
    for place in jax.tree.leaves(places["rows"]):
        label = found[place]
        if label is None or (label.axis, label.outer) != (0, 1):
            raise RowsMix("an output or a loss is not one value per row of the batch")
    for place in places["derivative"]:
        # Zero where nothing is trained: then it has no batch in it.
        label = found[place]
        if label is not None and (label.axis, label.outer) != (0, 1):
            raise RowsMix("a gradient is not a sum over the rows of the batch")
    for place in jax.tree.leaves(places["losses"]):
        if found[place] not in (None, LOSS):
            raise RowsMix("the loss depends on the size of the batch")


def _is_unchanged(place: int, jaxpr: Any) -> bool:
    return any(jaxpr.outvars[place] is variable for variable in jaxpr.invars)


def _check_state(
    model: Any, places: list[int], jaxpr: Any, found: list[Label | None]
) -> None:
    for variable, place in zip(model.non_trainable_variables, places, strict=True):
        if found[place] not in ((SEED, None) if is_seed(variable) else (None,)):
            raise RowsMix("a variable changes with the batch")
        if variable.aggregation == "sum" and not _is_unchanged(place, jaxpr):
            raise RowsMix("a variable counts steps, and replicas' counts add up")


def _check_metrics(
    model: Any, places: list[int], jaxpr: Any, found: list[Label | None]
) -> None:
    # Per-output loss trackers are summed exactly in the replica view. Any other
    # metric that the forward pass touches may keep anything, a maximum say.
    compile_loss = getattr(model, "_compile_loss", None)
    trackers = {id(v) for v in getattr(compile_loss, "variables", [])}
    for variable, place in zip(model.metrics_variables, places, strict=True):
        label = found[place]
        if label is not None and label.axis >= 0:
            raise RowsMix("a metric keeps one value per row of the batch")
        if id(variable) not in trackers and not _is_unchanged(place, jaxpr):
            raise RowsMix("a layer updates a metric during the forward pass")


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Python code that draws numbers while traced must draw them once."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def why_rows_mix(model: Any, state: Any, data: Any, num_replicas: int) -> str | None:
    """Why the replica view would not give one device's numbers, None if it does.

    Args:
        model: A model whose `train_step` is Keras' own.
        state: The four lists of a train step's state; shapes and dtypes are read.
        data: A batch, every array of it with the same number of rows.
        num_replicas: How many replicas divide those rows.
    """
    total = jax.tree.leaves(data)[0].shape[0]
    rows = (total // num_replicas, total)
    try:
        with _random_state_kept():
            traces, structure = _traces(model, state, data, rows)
    except Exception as error:  # noqa: BLE001
        # A user's code that cannot be traced at other batch sizes; if it cannot
        # be traced at all, the global view will say so.
        return f"the step cannot be traced at other batch sizes ({error})"
    try:
        _check(model, _labels(model, state, data), traces, structure, rows)
    except RowsMix as reason:
        return str(reason)
    except Exception as error:  # noqa: BLE001
        # Ours: the numbers stay right in the global view, so training goes on.
        _log.warning("Looking for mixed rows failed; please report", exc_info=True)
        return f"looking for mixed rows failed ({error!r})"
    return None
