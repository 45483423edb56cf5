"""What tells two traced programs apart, the same in every process."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def of(jaxpr: Any) -> str:
    """A few words that differ where operations, shapes, or numbers in them do.

    Not the addresses and names that a program carries along, which differ between
    processes that do the same.
    """
    lines = list(_lines(jaxpr))
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=4).hexdigest()
    return f"{len(lines)} operations ({digest})"


def _lines(jaxpr: Any) -> Iterator[str]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        numbers = [_number(v.val) for v in equation.invars if hasattr(v, "val")]
        kinds = [str(v.aval) for v in equation.outvars]
        options = {name: _plain(v) for name, v in sorted(equation.params.items())}
        yield f"{equation.primitive.name} {numbers} {kinds} {options}"
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from _lines(value)


def _number(value: Any) -> Any:
    return np.asarray(value).tolist() if np.ndim(value) == 0 else np.shape(value)


def _plain(value: Any) -> Any:
    """An option that is a number or a flag; nothing of what may have an address."""
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return ""
