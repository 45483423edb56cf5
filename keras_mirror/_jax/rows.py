"""Does each row of a result depend on the same row of the batch alone?

Where it does, a step may run once per replica on that replica's rows and give the
numbers of one device. This module finds out from the traced program (jaxpr), so a
user's own layer or loss that compares rows is seen for what it is.

Method: the function and its derivative are traced at two batch sizes, that of one
replica and that of all. Dimensions whose size differs between the traces carry the
batch. A walk over the equations then follows each
batch dimension from the inputs to the results; an equation that mixes along it, or
that is not known not to (`row_rules`), ends the walk with a reason. The walk is
one of abstract interpretation (Cousot and Cousot, "Abstract interpretation: a
unified lattice model for static analysis of programs", 1977).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

# Parameters that hold shapes; what they say is checked on the results.
_SHAPES = {"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes"}

# Their transposes are functions that no trace shows.
_OPAQUE = {"custom_lin", "custom_transpose_call"}


class RowsMix(Exception):
    """Some result depends on more than its own row; the text says which."""


@dataclass(frozen=True)
class Label:
    """Where the batch is in a value.

    Attributes:
        kind: "rows": element i along the axis belongs to row i of the batch.
            "uniform": has a batch axis, but was made without looking at the batch
            (zeros, noise). "size": no batch axis, but depends on the batch size.
            "loss": no batch axis, a linear function of reduced losses. "seed": no
            batch axis, comes from the state of a seed generator.
        axis: The batch dimension, -1 where there is none.
        outer: The dimension has size outer * batch * inner; rows repeat in that
            order after a reshape has merged dimensions.
    """

    kind: str
    axis: int = -1
    outer: int = 1


SIZE = Label("size")
LOSS = Label("loss")
SEED = Label("seed")
# Where a reduced loss may go so that the mean over replicas still commutes.
# fmt: off
_LINEAR = {
    "add", "add_any", "sub", "neg", "mul", "div", "convert_element_type", "reshape",
    "broadcast_in_dim", "squeeze", "expand_dims", "stack", "concatenate",
    "reduce_sum", "copy", "transpose",
}
# fmt: on


@dataclass(frozen=True)
class Pair:
    """The same variable of the two traces."""

    small: Any
    large: Any
    rows: tuple[int, int]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.small.aval.shape), tuple(self.large.aval.shape)

    def batch_axis(self) -> int | None:
        """The dimension that grows with the batch, None where none does."""
        small, large = self.shapes
        if len(small) != len(large) or self.small.aval.dtype != self.large.aval.dtype:
            raise RowsMix("a rank or dtype depends on the batch size")
        pairs = enumerate(zip(small, large, strict=True))
        axes = [i for i, (a, b) in pairs if a != b]
        if not axes:
            return None
        if len(axes) > 1:
            raise RowsMix("rows of the batch are compared with each other")
        axis = axes[0]
        if small[axis] * self.rows[1] != large[axis] * self.rows[0]:
            raise RowsMix("a size depends on the batch size in another way")
        return axis


@dataclass
class Equation:
    """One equation of both traces, with what is known of its operands."""

    name: str
    params: dict[str, Any]
    large_params: dict[str, Any]
    inputs: list[Pair]
    outputs: list[Pair]
    labels: list[Label | None]

    def mix(self) -> RowsMix:
        return RowsMix(f"`{self.name}` combines different rows of the batch")

    def batched(self) -> list[tuple[Pair, Label]]:
        """The operands that have a batch dimension."""
        found = zip(self.inputs, self.labels, strict=True)
        return [(p, lab) for p, lab in found if lab is not None and lab.axis >= 0]

    def label(self, output: Pair) -> Label | None:
        """The output's label, if its batch dimension is the operands'."""
        batched = [label for _, label in self.batched()]
        axis = output.batch_axis()
        if axis is None:
            if batched:
                raise self.mix()
            return self._scalar_label()
        rows = [label for label in batched if label.kind == "rows"]
        if SIZE in self.labels or LOSS in self.labels:
            raise RowsMix("a row's result is scaled by the batch size or its loss")
        if len({label.outer for label in batched}) > 1:
            raise self.mix()
        kind = "rows" if rows else "uniform"
        return Label(kind, axis, batched[0].outer if batched else 1)

    def _scalar_label(self) -> Label | None:
        if LOSS in self.labels:
            twice = self.name == "mul" and self.labels.count(LOSS) > 1
            below = self.name == "div" and self.labels[1] == LOSS
            whole = self.name == "convert_element_type" and not jnp.issubdtype(
                self.params["new_dtype"], jnp.floating
            )
            if self.name not in _LINEAR or twice or below or whole:
                raise RowsMix(f"a reduced loss goes through `{self.name}`")
        for label in (SIZE, LOSS, SEED):
            if label in self.labels:
                return label
        return None


Rule = Callable[[Equation], "list[Label | None]"]


def _literal_label(pair: Pair) -> Label | None:
    small, large = np.asarray(pair.small.val), np.asarray(pair.large.val)
    if small.shape != large.shape:
        return SIZE
    # Byte by byte: NaN differs from itself, and the derivative of a flag (float0)
    # compares with nothing.
    return None if small.tobytes() == large.tobytes() else SIZE


def _constant_label(small: Any, large: Any) -> Label | None:
    if small is large:
        return None
    if np.shape(small) != np.shape(large):
        raise RowsMix("a constant was made for one batch size")
    if jnp.issubdtype(small.dtype, jax.dtypes.extended):  # random keys
        return None
    equal = np.array_equal(np.asarray(small), np.asarray(large))
    return None if equal else SIZE


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _check_params(small: dict[str, Any], large: dict[str, Any]) -> None:
    """Parameters may differ in shapes alone, which the rules look at."""
    for key, value in small.items():
        other = large.get(key)
        if key in _SHAPES or not (_is_plain(value) and _is_plain(other)):
            continue
        if repr(value) != repr(other):  # NaN differs from itself
            raise RowsMix("the program depends on the batch size")


class Walk:
    """Follows labels through a pair of programs.

    Args:
        rules: What each primitive does.
        makers: Primitives that may give a batch dimension to a result although no
            operand has one.
        unknown: The rule of every other primitive.
        rows: The two batch sizes.
    """

    def __init__(
        self,
        rules: dict[str, Rule],
        makers: frozenset[str],
        unknown: Rule,
        rows: tuple[int, int],
    ):
        self._rules = rules
        self._makers = makers
        self._unknown = unknown
        self._rows = rows

    def closed(
        self, small: ClosedJaxpr, large: ClosedJaxpr, labels: Sequence[Label | None]
    ) -> list[Label | None]:
        """Labels of a closed program's results from those of its arguments."""
        if len(small.consts) != len(large.consts):
            raise RowsMix("the program depends on the batch size")
        constants = [
            _constant_label(a, b)
            for a, b in zip(small.consts, large.consts, strict=True)
        ]
        return self.open(small.jaxpr, large.jaxpr, [*constants, *labels])

    def open(
        self, small: Any, large: Any, labels: Sequence[Label | None]
    ) -> list[Label | None]:
        """The same where constants come first among the arguments."""
        known: dict[Any, Label | None] = {}
        known.update(zip([*small.constvars, *small.invars], labels, strict=True))
        if len(small.eqns) != len(large.eqns):
            raise RowsMix("the program depends on the batch size")
        for one, two in zip(small.eqns, large.eqns, strict=True):
            equation = self._equation(one, two, known)
            known.update(zip(one.outvars, self._step(equation), strict=True))
        return [
            self._read(a, b, known)
            for a, b in zip(small.outvars, large.outvars, strict=True)
        ]

    def _pair(self, small: Any, large: Any) -> Pair:
        return Pair(small, large, self._rows)

    def _read(self, a: Any, b: Any, known: dict[Any, Label | None]) -> Label | None:
        if isinstance(a, Literal) != isinstance(b, Literal):
            raise RowsMix("the program depends on the batch size")
        if isinstance(a, Literal):
            return _literal_label(self._pair(a, b))
        return known[a]

    def _equation(self, one: Any, two: Any, known: dict[Any, Any]) -> Equation:
        if one.primitive.name != two.primitive.name:
            raise RowsMix("the program depends on the batch size")
        _check_params(one.params, two.params)
        inputs = list(map(self._pair, one.invars, two.invars))
        return Equation(
            one.primitive.name,
            one.params,
            two.params,
            inputs,
            list(map(self._pair, one.outvars, two.outvars)),
            [self._read(p.small, p.large, known) for p in inputs],
        )

    def _step(self, equation: Equation) -> "list[Label | None]":
        if equation.name in _OPAQUE:
            raise RowsMix("a gradient is defined by hand (custom_vjp)")
        rule = self._rules.get(equation.name, self._unknown)
        if not equation.batched() and equation.name not in self._makers:
            rule = self._unknown
        return rule(equation)
