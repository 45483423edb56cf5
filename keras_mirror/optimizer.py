"""The optimizer wrapper: gradients are reduced over replicas, then applied."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from keras_mirror import _context, _engine, errors

REDUCTIONS = ("mean", "sum")
_OWN = ("_inner", "_options", "_axis_name", "_reduce")


@keras.saving.register_keras_serializable("keras_mirror")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer so that gradients are reduced before they are applied.

    Under a strategy this happens without it; wrap an optimizer to choose how
    gradients are put together, or to use it in your own `jax.shard_map` or
    `jax.pmap` loop. There, `stateless_apply` (and `apply`) first reduces the
    gradients over the bound axis and then calls the wrapped optimizer. Where no
    axis is bound it is the wrapped optimizer. Put it outermost, around a
    `LossScaleOptimizer` too, so that all replicas agree on which steps to skip.

    Everything else (`learning_rate`, `iterations`, `variables`, ...) is the wrapped
    optimizer's, and a model compiled with one saves files that plain Keras loads.

    Args:
        inner: A Keras optimizer, or the name of one.
        reduction: "mean" (default) or "sum" of the replicas' gradients. The sum is
            the number of replicas times the mean, also for batches that the
            replicas do not divide.
        axis_name: Name of the mapped axis in a loop of your own. None takes the
            one axis that is bound.

    Raises:
        NotAnOptimizerError: `inner` is no optimizer.
        NestedDistributedOptimizerError: `inner` is a DistributedOptimizer.
        OptionValueError: `reduction` is neither "mean" nor "sum", or `axis_name` is
            no name.

    Cost: one all-reduce of all gradients per step.

    Reference: Sergeev and Del Balso, "Horovod: fast and easy distributed deep
    learning in TensorFlow", 2018 (the wrapper's shape).

    Example:

    ```python
    optimizer = km.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @functools.partial(jax.pmap, axis_name="devices")
    def step(trainable, state, x, y):
        grads = jax.grad(loss)(trainable, x, y)  # of this device's rows
        return optimizer.stateless_apply(state, grads, trainable)
    ```
    """

    # No super().__init__(): it would make variables and shadow the inner one's
    # attributes. What is not defined here is looked up on the inner optimizer.
    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        inner: Any,
        *,
        reduction: str = "mean",
        axis_name: str | None = None,
        _reduce: Callable[[Any, Any], Any] | None = None,
    ):
        if isinstance(inner, str):
            inner = keras.optimizers.get(inner)
        if isinstance(inner, DistributedOptimizer):
            raise errors.NestedDistributedOptimizerError(inner)
        if not isinstance(inner, keras.optimizers.Optimizer):
            raise errors.NotAnOptimizerError(inner)
        if reduction not in REDUCTIONS:
            raise errors.OptionValueError("reduction", reduction, REDUCTIONS)
        if axis_name is not None and not (isinstance(axis_name, str) and axis_name):
            raise errors.OptionKindError("axis_name", axis_name, "a name, or None")
        self._inner = inner
        self._options = _context.ReductionOptions(reduction)
        self._axis_name = axis_name
        self._reduce = _reduce

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while copying or unpickling
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __dir__(self) -> Iterable[str]:
        # Keras finds what to save by `dir`: it must find what plain Keras finds.
        return dir(self._inner)

    @property
    def inner(self) -> Any:
        """The wrapped optimizer."""
        return self._inner

    @property
    def options(self) -> _context.ReductionOptions:
        """How gradients are put together."""
        return self._options

    @property
    def axis_name(self) -> str | None:
        """The axis to reduce over, None for the one that is bound."""
        return self._axis_name

    def reduce_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients of this replica's rows -> gradients of the whole batch.

        Args:
            grads: One array per variable the optimizer was built with, None where
                there is none.

        Returns:
            The reduced gradients, equal on all replicas; `grads` as they came where
            no axis is bound.

        Raises:
            ReplicaAxisError: Several axes are bound and none is named, or the named
                one is not bound.
        """
        return self._reduced(grads, self._inner._trainable_variables)

    def _reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._reduce is not None:
            return self._reduce(grads, variables)
        return _engine.load().reduce_gradients(
            grads,
            variables,
            reduction=self._options.reduction,
            axis_name=self._axis_name,
        )

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduces the gradients, then applies them."""
        variables = trainable_variables
        if variables is None:
            variables = self._inner._trainable_variables
        grads = self._reduced(list(grads), list(variables))
        return self._inner.apply(grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Reduces the gradients of (gradient, variable) pairs, then applies them."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(list(grads), list(variables))
        return self._inner._iterations

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Reduces the gradients, then returns what the wrapped optimizer returns."""
        return self._inner.stateless_apply(
            optimizer_variables, self.reduce_gradients(grads), trainable_variables
        )

    def build(self, variables: Any) -> None:
        """Makes the wrapped optimizer's slots."""
        self._inner.build(variables)

    def scale_loss(self, loss: Any) -> Any:
        """The wrapped optimizer's loss scaling."""
        return self._inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """The wrapped optimizer's last word (its moving averages)."""
        self._inner.finalize_variable_values(var_list)

    def set_weights(self, weights: Any) -> None:
        """Sets the wrapped optimizer's slots."""
        self._inner.set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Writes what the wrapped optimizer writes."""
        self._inner.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what the wrapped optimizer reads."""
        self._inner.load_own_variables(store)

    @property
    def variables(self) -> Any:
        """The wrapped optimizer's variables."""
        return self._inner.variables

    @property
    def iterations(self) -> Any:
        """The wrapped optimizer's step count."""
        return self._inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate; may be set."""
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._inner.learning_rate = value

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal wrapper."""
        return {
            "inner": keras.saving.serialize_keras_object(self._inner),
            "reduction": self._options.reduction,
            "axis_name": self._axis_name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The wrapper that `get_config` described."""
        inner = keras.saving.deserialize_keras_object(
            config["inner"], custom_objects=custom_objects
        )
        rest = {key: value for key, value in config.items() if key != "inner"}
        return cls(inner, **rest)
