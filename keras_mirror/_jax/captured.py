"""What a function reads from around it: seen, so that a change is seen as well.

A compiled program keeps the Python values that its function read when it was traced.
Rebinding one of them later (`scale = 0.5` between two calls) must not go unnoticed.
"""

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions which it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What the function's closure holds, and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            yield None
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in sorted(names & function.__globals__.keys()):
        yield function.__globals__[name]


def _reached(function: types.FunctionType) -> Iterator[Any]:
    """All that the function and those beside it in its file or cell read."""
    seen, waiting = {id(function)}, [function]
    while waiting:
        for value in _named(waiting.pop()):
            if not isinstance(value, types.FunctionType):
                yield value
                continue
            yield value
            is_near = value.__globals__ is function.__globals__
            if is_near and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)


class _Same:
    """Equal as long as it is the same object, which is not held."""

    def __init__(self, value: Any):
        self._value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        value = self._value()
        return value is not None and value is other._value()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _sign(value: Any) -> Any:
    """Equal for the same object, and for equal plain values."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    try:
        return _Same(value)
    except TypeError:
        return type(value), id(value)


def captured(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """Compares equal as long as `fn` reads the same values from around it.

    Attributes of objects are not looked at.
    """
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    if not isinstance(function, types.FunctionType):
        return ()
    # Nests of arrays are looked through: a list of weights may be filled anew.
    return tuple(_sign(leaf) for leaf in jax.tree.leaves(list(_reached(function))))
