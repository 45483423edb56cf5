"""What `strategy.run` compiles: a function, with the variables it reads as inputs."""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from keras_mirror import _context, errors
from keras_mirror._jax import random
from keras_mirror._jax.captured import captured
from keras_mirror._jax.collectives import combine, entering, is_float, sum_and_mean
from keras_mirror._jax.compat import shard_map
from keras_mirror._jax.copies import lowered
from keras_mirror._jax.mesh import replica_axis, spans_processes
from keras_mirror._jax.state import place_values
from keras_mirror._seeds import is_seed

# The first pass finds the variables; a layer may be built in each of a few more.
_MOST_PASSES = 6
_MOST_PROGRAMS_OF_A_FUNCTION = 16


@dataclass(frozen=True)
class Fixed:
    """An argument that is part of the program.

    Attributes:
        kind: Its type; 2 and 2.0 are equal, and so are 0.0 and -0.0.
        text: Of a number.
        value: The argument.
    """

    kind: type
    text: str
    value: Any

    @classmethod
    def of(cls, value: Any) -> "Fixed":
        """The argument as it came."""
        is_number = isinstance(value, (int, float, complex))
        return cls(type(value), repr(value) if is_number else "", value)


@dataclass(frozen=True)
class Varying:
    """An array among the arguments.

    Attributes:
        spec: How it is divided over the replicas.
        is_own: Whether each replica has a value of its own, stacked: [replicas, ...].
    """

    spec: P
    is_own: bool


class _Recording(keras.StatelessScope):
    """What the code of one replica reads of Keras variables, and assigns to them.

    Values assigned inside a traced program are not values outside of it; they
    leave it as results, put together as in a step's replica view.
    """

    def __init__(self, replica_id: jax.Array, mesh: Mesh, given: dict[int, jax.Array]):
        super().__init__()
        self._replica_id = replica_id
        self._mesh = mesh
        self._given = given
        self.updates: dict[int, tuple[Any, jax.Array]] = {}
        # Variables that are no inputs of the program yet.
        self.missed: dict[int, Any] = {}
        # Variables that a layer made in here: they have no values yet.
        self.made: list[Any] = []

    def add_update(self, update: tuple[Any, jax.Array]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = update

    def get_current_value(self, variable: Any) -> Any:
        found = super().get_current_value(variable)
        if found is not None:
            return found
        if variable._value is None:
            self.made.append(variable)
            return None  # Keras puts its first value there
        value = self._given.get(id(variable))
        if value is None:
            self.missed[id(variable)] = variable
            value = jnp.asarray(np.asarray(variable._value))
        if is_seed(variable):
            return random.fold_in(value, self._replica_id)
        return entering(value, variable.aggregation, self._replica_id)

    def merged(self) -> list[jax.Array]:
        """The new values of the assigned variables, equal on all replicas."""
        means: dict[str, Any] = {}
        sums: dict[str, Any] = {}
        for i, (variable, new) in enumerate(self.updates.values()):
            if is_seed(variable):
                means[str(i)] = random.fold_out(new, self._replica_id)
                continue
            how, value = combine(new, variable.aggregation, self._replica_id)
            (means if how == "mean" else sums)[str(i)] = value
        seeds = {k: means.pop(k) for k in list(means) if not is_float(means[k])}
        sums, means = sum_and_mean(
            sums, means, replica_axis(self._mesh), self._mesh.size
        )
        values = {**seeds, **sums, **means}
        return [values[str(i)] for i in range(len(self.updates))]


def _as_result(leaf: Any) -> jax.Array:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
        raise errors.PerReplicaValueError(
            "run",
            "the function must return arrays, numbers or nests of them. Received: "
            f"{leaf!r} of type {type(leaf).__name__}.",
        )
    return jnp.asarray(leaf)[None]


class Program:
    """One function compiled for one kind of arguments.

    Args:
        mesh: The replicas.
        function: Gives the function; it is held by its caller alone.
        structure: Of the positional and keyword arguments.
        kinds: Of each leaf, what it is.
        arrays: Of the first call.
    """

    def __init__(
        self,
        mesh: Mesh,
        function: Callable[[], Callable[..., Any]],
        structure: Any,
        kinds: list[Fixed | Varying],
        arrays: list[Any],
    ):
        self._mesh = mesh
        self._function = function
        self._structure = structure
        self._kinds = kinds
        self._read: list[Any] = []
        self._assigned: list[Any] = []
        for _ in range(_MOST_PASSES):
            made, missed = self._pass(arrays)
            if not made and not missed:
                return
            self._read += missed
        raise errors.RunArgumentError(
            "The function makes variables at every call "
            f"({(made or missed)[0].path} is one); make them outside, or once.",
            function(),
        )

    def _pass(self, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        """Traces; returns variables that were made, and those that are no inputs."""
        found: list[_Recording] = []

        def local(values: list[Any], *parts: Any) -> Any:
            return self._replica(found, values, parts)

        axis = replica_axis(self._mesh)
        specs = [kind.spec for kind in self._kinds if isinstance(kind, Varying)]
        mapped = shard_map(
            local,
            mesh=self._mesh,
            in_specs=(P(), *specs),
            out_specs=(P(axis), P()),
            check_vma=False,
        )
        self._compiled = jax.jit(mapped)
        # What a layer makes when it is first called gets its values at the end of
        # the outermost scope, which must lie outside of the traced program.
        with keras.StatelessScope():
            self._compiled.trace(self._inputs(), *arrays)
        return found[-1].made, list(found[-1].missed.values())

    def _replica(self, found: list[_Recording], values: Any, parts: Any) -> Any:
        """The function on one replica, traced."""
        axis = replica_axis(self._mesh)
        rest = iter(parts)
        leaves = [
            kind.value
            if isinstance(kind, Fixed)
            else (next(rest)[0] if kind.is_own else next(rest))
            for kind in self._kinds
        ]
        args, kwargs = self._structure.unflatten(leaves)
        given = {id(v): x for v, x in zip(self._read, values, strict=True)}
        here = _context.ReplicaContext(jax.lax.axis_index(axis), self._mesh.size, axis)
        recording = _Recording(here.replica_id, self._mesh, given)
        found.append(recording)
        with _context.replica(here), recording:
            result = self._function()(*args, **kwargs)
        if recording.made or recording.missed:
            return None, []  # not the last pass
        self._assigned = [variable for variable, _ in recording.updates.values()]
        return jax.tree.map(_as_result, result), recording.merged()

    def _inputs(self) -> list[jax.Array]:
        return place_values([v._value for v in self._read], self._mesh)

    def __call__(self, arrays: list[Any]) -> Any:
        """Runs it: [replicas, ...] of each leaf that the function returns."""
        result, values = self._compiled(self._inputs(), *arrays)
        for variable, value in zip(self._assigned, values, strict=True):
            if spans_processes(self._mesh):
                value = lowered(value, self._mesh)
            variable.assign(value)
        return result


# The programs of each function, for as long as it lives.
_programs: "weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Program]]]" = (
    weakref.WeakKeyDictionary()
)


def _reference(fn: Callable[..., Any]) -> tuple[Any, Callable[[], Callable[..., Any]]]:
    """The object that a function lives as long as, and how to get at the function."""
    if not inspect.ismethod(fn):
        return fn, weakref.ref(fn)  # pyright: ignore[reportReturnType]
    owner, method = weakref.ref(fn.__self__), fn.__func__
    return fn.__self__, lambda: method.__get__(owner())


def _key(
    mesh: Mesh, fn: Any, structure: Any, kinds: list[Fixed | Varying], arrays: list[Any]
) -> Any:
    shapes = tuple(jax.typeof(array) for array in arrays)
    return mesh, getattr(fn, "__func__", None), structure, tuple(kinds), shapes


def find(
    mesh: Mesh,
    fn: Callable[..., Any],
    structure: Any,
    kinds: list[Fixed | Varying],
    arrays: list[Any],
) -> Program:
    """The program of a function for such arguments: a kept one, or a new one.

    A new one is made where `fn` reads other values from around it than it did.
    """
    try:
        owner, function = _reference(fn)
        key, now = _key(mesh, fn, structure, kinds, arrays), captured(fn)
        kept = _programs.setdefault(owner, {})
        before, program = kept.get(key, (None, None))
    except TypeError:  # arguments, or a function, that cannot be told again
        return Program(mesh, lambda: fn, structure, kinds, arrays)
    if program is None or before != now:
        program = Program(mesh, function, structure, kinds, arrays)
        kept[key] = captured(fn), program  # the first call may have built a model
        while len(kept) > _MOST_PROGRAMS_OF_A_FUNCTION:
            del kept[next(iter(kept))]
    return program
