"""A model's steps: once per replica on its rows, or whole on one device.

Variables lie on one device. A replica reads them there, and computes gradients of its
rows; these are added up by tf.distribute, and the optimizer and the metrics then run
once, as on one device, so that any of them is right. What cannot be divided (a batch of
other rows than a multiple of the replicas, a step of the user's own) runs whole: that
is the one-device program.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_mirror import _context
from keras_mirror._seeds import is_seed
from keras_mirror._tensorflow.entered import Entered, other_variables
from keras_mirror._tensorflow.losses import ReplicaHooks, SynchronizedHooks

_log = logging.getLogger("keras_mirror")
_TOLERANCE = 1e-4


def without_optionals(data: Any) -> Any:
    """A batch of tf.data with None where it has an empty Optional."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def _rows(data: Any) -> int | None:
    """How many rows all arrays have; None where they do not agree."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    counts = set()
    for leaf in leaves:
        is_dense = isinstance(leaf, tf.Tensor) or hasattr(leaf, "__array__")
        if not is_dense or not len(leaf.shape):
            return None
        counts.add(leaf.shape[0])
    return counts.pop() if len(counts) == 1 else None


def _own_rows(data: Any, index: Any, count: int) -> Any:
    def own(leaf: Any) -> Any:
        if leaf is None:
            return None
        size = tf.shape(leaf)[0] // count
        return leaf[index * size : (index + 1) * size]

    return tf.nest.map_structure(own, data)


def home_of(strategy: Any) -> str:
    """Name of the device that holds the variables under `strategy`."""
    return getattr(strategy, "storage_device", None) or strategy.devices[0]


class StepFunction:
    """One step of a model.

    Args:
        model: The model, bound to `strategy`.
        strategy: Where to run.
    """

    # "train", "test" or "predict".
    _kind = "predict"

    def __init__(self, model: Any, strategy: Any):
        self.strategy = strategy
        self._model = model
        self._native = strategy.mesh
        self._count = strategy.num_replicas_in_sync
        self._home = home_of(strategy).upper()
        self._whole = self._compiled(self._on_home(self.step), model.jit_compile)
        self._divided = self._compiled(self.in_replicas, jit_compile=False)
        self._why: dict[Any, str | None] = {}
        self._changes_weights = False
        self._was_built = False

    def _compiled(self, function: Callable[..., Any], jit_compile: bool) -> Any:
        function = tf.autograph.experimental.do_not_convert(function)
        if self._model.run_eagerly:
            return function
        options = {"reduce_retracing": True, "jit_compile": jit_compile}
        return tf.function(function, **options)

    def _on_home(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_home(data: Any) -> Any:
            with tf.device(self._home):
                return function(data)

        return on_home

    def end(self, error: BaseException | None) -> None:
        """Called at the end of each call; variables stay where they are."""

    def step(self, data: Any) -> Any:
        """The one-device program."""
        raise NotImplementedError

    def in_replicas(self, data: Any) -> Any:
        """The same, of which each replica computes its rows."""
        raise NotImplementedError

    def __call__(self, data: Any) -> Any:
        data = without_optionals(data)
        if self._count > 1 and not self._model.run_eagerly:
            self._build(data)
        why = self.why_whole(data)
        if why is not None:
            return self._whole(data)
        return self._divided(data)

    def _build(self, data: Any) -> None:
        """Makes the slots and metrics, where the first step would.

        Layers that have no weights yet get them in the first step, whole: so they begin
        as in plain Keras.
        """
        internals = _context.internals()
        if self._kind == "predict" or self._is_built():
            return
        if not internals.is_built(self._model, "predict"):
            return
        with contextlib.suppress(Exception):
            internals.build(self._model, data)

    def _is_built(self) -> bool:
        # Looked for at each step until it is so: what is built stays it.
        if not self._was_built:
            internals = _context.internals()
            self._was_built = internals.is_built(self._model, self._kind)
        return self._was_built

    def why_whole(self, data: Any) -> str | None:
        """Why a batch is not divided; None where it is."""
        if self._count == 1:
            return "there is one replica"
        if self._model.run_eagerly:
            return "the step is not compiled"
        internals = _context.internals()
        if not internals.has_default_step(self._model):
            return "the model has a step of its own"
        if not self._is_built():
            return "the model is not built"
        rows = _rows(data)
        if not rows or rows % self._count:
            return "the replicas do not divide it"
        if self.strategy.view == "global":
            return 'view="global"'
        if self.strategy.view == "replica":
            return None
        key = tf.nest.map_structure(
            lambda leaf: None if leaf is None else (tuple(leaf.shape), str(leaf.dtype)),
            data,
        )
        key = repr(key)
        if key not in self._why:
            found = self._why[key] = self._why_rows_mix(data)
            _log.info(
                "%s: batches are %s", self._model.name, found or "divided over replicas"
            )
        return self._why[key]

    def _why_rows_mix(self, data: Any) -> str | None:
        """Whether rows depend on each other, by trying it out without training."""
        try:
            whole = tf.nest.flatten(self.tried(data))
            divided = tf.nest.flatten(self.tried_in_replicas(data))
        except Exception as error:  # noqa: BLE001  a user's code on other batch sizes
            first = str(error).partition("\n")[0]
            return f"whole: it cannot be divided ({first})"
        if len(whole) == len(divided) and all(map(_are_close, divided, whole)):
            return None
        return "whole: a row's outputs, or its loss, depend on other rows"

    def tried(self, data: Any) -> Any:
        """What the model makes of a batch while it does not train."""
        raise NotImplementedError

    def tried_in_replicas(self, data: Any) -> Any:
        """The same, each replica on its rows."""
        raise NotImplementedError

    def replica_inputs(self) -> tuple[int, Any]:
        """Which replica this is, and its hooks."""
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_synchronized = getattr(self.strategy, "synchronize_batch_norm", False)
        return index, SynchronizedHooks() if is_synchronized else ReplicaHooks()

    def joined(self, outputs: Any) -> Any:
        """The replicas' outputs, in the order of rows."""
        return tf.nest.map_structure(
            lambda leaf: tf.concat(self._native.experimental_local_results(leaf), 0),
            outputs,
        )


def _are_close(found: Any, expected: Any) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.dtype.is_floating:
        return bool(tf.reduce_all(found == expected))
    found, expected = tf.cast(found, "float32"), tf.cast(expected, "float32")
    is_close = tf.abs(found - expected) <= _TOLERANCE * (1 + tf.abs(expected))
    both_nan = tf.math.is_nan(found) & tf.math.is_nan(expected)
    return bool(tf.reduce_all(is_close | both_nan))


class TestFunction(StepFunction):
    """Evaluates."""

    _kind = "test"

    def tried(self, data: Any) -> Any:
        """Loss, outputs and changed state of the whole batch."""
        model, training = self._model, self._tries_training()
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        others = other_variables(model)
        mapping = [(v, tf.identity(v.value)) for v in others]
        before = [value for _, value in mapping]
        mapping += [(v, v.value) for v in model.trainable_variables]
        scope = keras.StatelessScope(state_mapping=mapping, collect_losses=True)
        with tf.device(self._home), scope:
            y_pred = _called(model, x, training=training)
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
            )
        values = [scope.get_current_value(variable) for variable in others]
        pairs = enumerate(zip(values, before, strict=True))
        return loss, y_pred, {i: new for i, (new, old) in pairs if new is not old}

    def tried_in_replicas(self, data: Any) -> Any:
        """Loss, outputs and changed state, put together."""
        return self._divide(data, training=self._tries_training())[:3]

    def _tries_training(self) -> bool:
        """Whether it can be seen in training that rows do not depend on each other."""
        return False

    def step(self, data: Any) -> Any:
        """Keras' own test step."""
        return self._model.test_step(data)

    def in_replicas(self, data: Any) -> Any:
        """Outputs and loss by the replicas, the metrics once, over all rows."""
        return self._finished(data, *self._divide(data, training=False))

    def _divide(self, data: Any, *, training: bool) -> Any:
        model, known = self._model, {}

        def replica(data: Any) -> Any:
            index, hooks = self.replica_inputs()
            rows = _own_rows(data, index, self._count)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(rows)
            entered = Entered(model, index)
            with (
                tf.GradientTape(watch_accessed_variables=False) as tape,
                _context.hooks(hooks),
                keras.StatelessScope(
                    state_mapping=entered.mapping, collect_losses=True
                ) as scope,
            ):
                tape.watch(entered.trainable)
                y_pred = _called(model, x, training=training)
                loss = model._compute_loss(
                    x=x,
                    y=y,
                    y_pred=y_pred,
                    sample_weight=sample_weight,
                    training=training,
                )
                scaled = model.optimizer.scale_loss(loss) if training else loss
            self._changes_weights |= entered.has_other_weights(scope)
            left = entered.left(scope)
            masks = [_mask_of(leaf) for leaf in tf.nest.flatten(y_pred)]
            known["masks"] = [mask is not None for mask in masks]
            masks = [mask for mask in masks if mask is not None]
            if not training:
                return loss, y_pred, masks, left
            grads = tape.gradient(scaled, entered.trainable)
            known["grads"] = [grad is not None for grad in grads]
            grads = [grad for grad in grads if grad is not None]
            return loss, y_pred, masks, left, grads

        found = self._native.run(replica, args=(data,))
        loss, y_pred, masks, left, *rest = found
        add = functools.partial(self._native.reduce, "SUM", axis=None)
        left = {place: add(value) for place, value in left.items()}
        y_pred = self.joined(y_pred)
        masks = iter(self.joined(masks))
        for leaf, has_mask in zip(tf.nest.flatten(y_pred), known["masks"], strict=True):
            if has_mask:
                leaf._keras_mask = next(masks)
        if not training:
            return add(loss), y_pred, left
        sums = iter([add(grad) for grad in rest[0]])
        grads = [next(sums) if there else None for there in known["grads"]]
        return add(loss), y_pred, left, grads

    def _finished(self, data: Any, loss: Any, y_pred: Any, left: Any) -> Any:
        model = self._model
        variables = other_variables(model)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.device(self._home):
            for place, value in left.items():
                variables[place].assign(value)
            rows = tf.shape(next(v for v in tf.nest.flatten(x) if v is not None))[0]
            model._loss_tracker.update_state(loss, sample_weight=rows)
            return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


class TrainFunction(TestFunction):
    """Trains."""

    _kind = "train"

    def __init__(self, model: Any, strategy: Any, reduction: str):
        super().__init__(model, strategy)
        self._factor = 1 if reduction == "mean" else self._count

    def _tries_training(self) -> bool:
        # Else masks and batch statistics differ between replicas, as they are to.
        model = self._model
        is_random = any(is_seed(v) for v in model.non_trainable_variables)
        return not is_random and not _context.internals().has_batch_norm(model)

    def _why_rows_mix(self, data: Any) -> str | None:
        why = super()._why_rows_mix(data)
        if self._changes_weights:
            return "whole: a layer assigns to its weights"
        if why is not None or self._tries_training():
            return why
        changed = self._divide(data, training=True)[2]
        if self._changes_weights:
            return "whole: a layer assigns to its weights"
        others = self._model.non_trainable_variables
        known = _context.internals().batch_norm_variables(self._model)
        for place in changed:
            is_known = place >= len(others) or is_seed(others[place])
            if not is_known and id(others[place]) not in known:
                return f"whole: {others[place].path} changes in training"
        return None

    def step(self, data: Any) -> Any:
        """The model's own train step."""
        if self._factor == 1:
            return self._model.train_step(data)

        def scaled(grads: Any, _: Any) -> Any:
            return [_times(grad, self._factor) for grad in grads]

        with _context.internals().reducing_optimizers(self._model, scaled):
            return self._model.train_step(data)

    def in_replicas(self, data: Any) -> Any:
        """Gradients by the replicas, the update once."""
        loss, y_pred, left, grads = self._divide(data, training=True)
        model = self._model
        with tf.device(self._home):
            grads = [_times(grad, self._factor) for grad in grads]
            pairs = zip(grads, model.trainable_variables, strict=True)
            model.optimizer.apply_gradients(list(pairs))
        return self._finished(data, loss, y_pred, left)


class PredictFunction(StepFunction):
    """Predicts."""

    def tried(self, data: Any) -> Any:
        """Outputs of the whole batch."""
        with tf.device(self._home), keras.StatelessScope():
            return self.step(data)

    def tried_in_replicas(self, data: Any) -> Any:
        """Outputs, put together."""
        return self.in_replicas(data)

    def step(self, data: Any) -> Any:
        """Keras' own predict step."""
        return self._model.predict_step(data)

    def in_replicas(self, data: Any) -> Any:
        """Each replica predicts its rows."""

        def replica(data: Any) -> Any:
            index, _ = self.replica_inputs()
            return self._model.predict_step(_own_rows(data, index, self._count))

        return self.joined(self._native.run(replica, args=(data,)))


def _mask_of(leaf: Any) -> Any:
    """The mask that Keras has put on an output, for the metrics."""
    return getattr(leaf, "_keras_mask", None)


def _times(grad: Any, factor: int) -> Any:
    if grad is None or factor == 1:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor


def _called(model: Any, x: Any, *, training: bool) -> Any:
    if model._call_has_training_arg:
        return model(x, training=training)
    return model(x)
