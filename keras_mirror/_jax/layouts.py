"""The order of axes in which gradients are reduced.

The derivative of a matrix product over several axes (rows and positions, in a
transformer) is a product whose result is transposed. An all-reduce of the transposed
array keeps XLA from taking the transposition into the product, so the array is reduced
as the product leaves it. A product over one axis is left as it is: there XLA makes the
transposed product at once. (Measured on CPU devices, docs/benchmarks.md.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

Order = tuple[int, ...]


def gradients(
    function: Callable[..., Any], weights: list[jax.Array], *args: Any
) -> tuple[list[jax.Array], Any, list[Order | None]]:
    """The gradients of a function, and where they come from.

    Args:
        function: Returns a scalar, and a nest of arrays beside it.
        weights: What to differentiate by.
        args: The function's further arguments, nests of arrays.

    Returns:
        The gradients; what the function returns beside the scalar; for each gradient
        the transposition that ends a product over several axes, else None.
    """
    differentiated = jax.grad(function, has_aux=True)
    program, shapes = jax.make_jaxpr(differentiated, return_shape=True)(weights, *args)
    leaves = jaxpr_as_fun(program)(*jax.tree.leaves((weights, args)))
    grads, aux = jax.tree.structure(shapes).unflatten(leaves)
    # The gradients come first.
    made = program.jaxpr.outvars[: len(grads)]
    return grads, aux, [_order(program.jaxpr, variable) for variable in made]


def _maker(jaxpr: Any, variable: Any) -> tuple[Any, Any]:
    """The equation that makes a variable, calls looked into, and its jaxpr."""
    for equation in jaxpr.eqns:
        for place, out in enumerate(equation.outvars):
            if out is not variable:
                continue
            inner = equation.params.get("jaxpr")
            if equation.primitive.name in ("jit", "pjit"):
                return _maker(inner.jaxpr, inner.jaxpr.outvars[place])
            return equation, jaxpr
    return None, jaxpr


def _order(jaxpr: Any, variable: Any) -> Order | None:
    equation, jaxpr = _maker(jaxpr, variable)
    if equation is None or equation.primitive.name != "transpose":
        return None
    product, _ = _maker(jaxpr, equation.invars[0])
    if product is None or product.primitive.name != "dot_general":
        return None
    (contracted, _), _ = product.params["dimension_numbers"]
    return equation.params["permutation"] if len(contracted) > 1 else None


def before(value: jax.Array | None, order: Order | None) -> jax.Array | None:
    """The value as the product left it; None stays None."""
    if order is None or value is None:
        return value
    return jnp.transpose(value, [order.index(axis) for axis in range(len(order))])


def after(value: jax.Array | None, order: Order | None) -> jax.Array | None:
    """The value as its variable has it; None stays None."""
    if order is None or value is None:
        return value
    return jnp.transpose(value, order)
