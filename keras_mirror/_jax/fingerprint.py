"""What tells two traced programs apart, the same in every process."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_mirror._jax import equations

_MOST_LINES = 5


def of(jaxpr: Any) -> str:
    """A few words that differ where operations, shapes, or numbers in them do.

    Not the addresses and names that a program carries along, which differ between
    processes that do the same.
    """
    lines = [_line(equation) for equation in equations.all_of(jaxpr)]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=4).hexdigest()
    return f"{len(lines)} operations ({digest})"


def settings(model: Any) -> list[str]:
    """What a model was compiled with, an option a line."""
    with contextlib.suppress(Exception):  # a user's own objects say what they like
        return sorted(_flat(model.get_compile_config() or {}, ""))
    return []


def _flat(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _flat(each, f"{name}[{place}]")
    else:
        yield f"{name}={value!r}".replace(".config.", ".")


def differing(told: list[tuple[str, list[str]]]) -> list[str]:
    """Of each worker, its program and what it was compiled with that others were not.

    Args:
        told: The words of `of` and of `settings`, of each worker.
    """
    common = set.intersection(*(set(lines) for _, lines in told))
    found = []
    for words, lines in told:
        own = [line for line in lines if line not in common][:_MOST_LINES]
        found.append(f"{words}, {', '.join(own)}" if own else words)
    return found


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
