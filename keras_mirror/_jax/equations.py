"""The operations of a traced program."""

from collections.abc import Iterator
from typing import Any

import jax


def all_of(jaxpr: Any) -> Iterator[Any]:
    """Its equations, each followed by those of the programs that it calls."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from all_of(value)
