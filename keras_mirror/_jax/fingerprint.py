"""What tells two traced programs apart, the same in every process."""

import hashlib
from typing import Any

import numpy as np

from keras_mirror._jax import equations


def of(jaxpr: Any) -> str:
    """A few words that differ where operations, shapes, or numbers in them do.

    Not the addresses and names that a program carries along, which differ between
    processes that do the same.
    """
    lines = [_line(equation) for equation in equations.all_of(jaxpr)]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=4).hexdigest()
    return f"{len(lines)} operations ({digest})"


def _line(equation: Any) -> str:
    numbers = [_number(v.val) for v in equation.invars if hasattr(v, "val")]
    kinds = [str(v.aval) for v in equation.outvars]
    options = {name: _plain(v) for name, v in sorted(equation.params.items())}
    return f"{equation.primitive.name} {numbers} {kinds} {options}"


def _number(value: Any) -> Any:
    return np.asarray(value).tolist() if np.ndim(value) == 0 else np.shape(value)


def _plain(value: Any) -> Any:
    """An option that is a number or a flag; nothing of what may have an address."""
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return ""
