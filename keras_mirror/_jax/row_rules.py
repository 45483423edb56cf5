"""What each primitive does to the rows of a batch.

A primitive that is not listed mixes rows as soon as a batched value enters it: the
answer "no" costs speed, a wrong "yes" would cost exactness.
"""

import functools
import math

from keras_mirror._jax.row_loops import branches, call, loop, scan
from keras_mirror._jax.rows import SEED, Equation, Label, RowsMix, Rule, Walk

# fmt: off
_ELEMENTWISE = [
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan",
    "atan2", "atanh", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt",
    "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "lt_to", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "population_count", "pow", "random_gamma", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
    "polygamma", "sharding_constraint", "layout_constraint",
]
_REDUCTIONS = [
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
    "reduce_or", "reduce_xor", "argmax", "argmin",
]
_ONE_AXIS = ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"]
_NOISE = [
    "random_bits", "random_wrap", "random_unwrap", "random_seed", "random_fold_in",
    "random_split", "threefry2x32", "rng_bit_generator", "rng_uniform",
    "iota_2x32_shape",
]
_MATRICES = [
    "cholesky", "triangular_solve", "eigh", "eig", "qr", "svd", "lu", "schur",
]
# fmt: on
_CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
}


def _outputs(eq: Equation) -> list[Label | None]:
    return [eq.label(output) for output in eq.outputs]


def _require(eq: Equation, holds: bool) -> None:
    if not holds:
        raise eq.mix()


def _unknown(eq: Equation) -> list[Label | None]:
    _require(eq, not eq.batched())
    labels = _outputs(eq)
    if any(label is not None and label.axis >= 0 for label in labels):
        raise RowsMix(f"`{eq.name}` makes values for each row of the batch")
    return labels


def _elementwise(eq: Equation) -> list[Label | None]:
    for output in eq.outputs:
        axis = output.batch_axis()
        for pair, label in eq.batched():
            # Other dimensions may be 1 and broadcast; ranks are equal.
            sizes, new_sizes = pair.shapes[0], output.shapes[0]
            _require(eq, len(sizes) == len(new_sizes) and label.axis == axis)
            _require(eq, sizes[label.axis] == new_sizes[label.axis])
    return _outputs(eq)


def _reduction(eq: Equation) -> list[Label | None]:
    for _, label in eq.batched():
        _require(eq, label.axis not in eq.params["axes"])
    return _outputs(eq)


def _one_axis(key: str) -> Rule:
    def rule(eq: Equation) -> list[Label | None]:
        for _, label in eq.batched():
            _require(eq, label.axis != eq.params[key])
        return _outputs(eq)

    return rule


def _noise(eq: Equation) -> list[Label | None]:
    _require(eq, not eq.batched())
    labels = _outputs(eq)
    drawn = any(label is not None and label.axis >= 0 for label in labels)
    if drawn and SEED not in eq.labels:
        # The same on each replica, where one device draws other rows.
        raise RowsMix("rows get random numbers that no seed generator made")
    return labels


def _iota(eq: Equation) -> list[Label | None]:
    (output,) = eq.outputs
    if output.batch_axis() == eq.params["dimension"]:
        raise RowsMix("a row's place in the batch is part of the computation")
    return _outputs(eq)


def _broadcast(eq: Equation) -> list[Label | None]:
    (output,) = eq.outputs
    axis = output.batch_axis()
    for pair, label in eq.batched():
        _require(eq, eq.params["broadcast_dimensions"][label.axis] == axis)
        _require(eq, pair.shapes[0][label.axis] == output.shapes[0][axis or 0])
    return _outputs(eq)


def _reshape(eq: Equation) -> list[Label | None]:
    """Rows keep their order if the batch ends up whole inside one dimension."""
    (output,) = eq.outputs
    batched = eq.batched()
    (pair, label), *_ = batched
    axis = output.batch_axis()
    _require(eq, axis is not None and eq.params.get("dimensions") is None)
    assert axis is not None
    # Elements before one step of the batch index are the same in both traces, so
    # the batch's outer count says where it lies.
    shape, new_shape = pair.shapes[0], output.shapes[0]
    outer = label.outer * math.prod(shape[: label.axis])
    before = math.prod(new_shape[:axis])
    _require(eq, outer % before == 0)
    outer //= before
    _require(eq, new_shape[axis] % (pair.rows[0] * outer) == 0)
    return [Label(label.kind, axis, outer)]


def _dot(eq: Equation) -> list[Label | None]:
    (left_contract, right_contract), (left_batch, right_batch) = eq.params[
        "dimension_numbers"
    ]
    places = []
    sides = ((left_contract, left_batch), (right_contract, right_batch))
    for label, (contract, batch) in zip(eq.labels, sides, strict=True):
        if label is not None and label.axis >= 0:
            _require(eq, label.axis not in contract)
            places.append(batch.index(label.axis) if label.axis in batch else None)
    if len(places) == 2:
        _require(eq, places[0] is not None and places[0] == places[1])
    return _outputs(eq)


def _convolution(eq: Equation) -> list[Label | None]:
    left, right = eq.labels
    numbers = eq.params["dimension_numbers"]
    _require(eq, right is None or right.axis < 0)
    if left is not None and left.axis >= 0:
        _require(eq, left.axis == numbers.lhs_spec[0])
        _require(eq, eq.params["batch_group_count"] == 1 and left.outer == 1)
    return _outputs(eq)


def _window(eq: Equation) -> list[Label | None]:
    for _, label in eq.batched():
        for key in ("window_dimensions", "window_strides", "window_dilation"):
            sizes = eq.params.get(key)
            _require(eq, sizes is None or sizes[label.axis] == 1)
        _require(eq, tuple(eq.params["padding"][label.axis]) == (0, 0))
    return _outputs(eq)


def _pad(eq: Equation) -> list[Label | None]:
    for _, label in eq.batched():
        config = eq.params["padding_config"][label.axis]
        _require(eq, tuple(config) == (0, 0, 0))
    return _outputs(eq)


def _same_size(eq: Equation) -> list[Label | None]:
    """Slices, splits and the like, that leave the batch dimension whole."""
    for pair, label in eq.batched():
        for output in eq.outputs:
            _require(eq, label.axis == output.batch_axis())
            _require(
                eq,
                all(
                    a[label.axis] == b[label.axis]
                    for a, b in zip(pair.shapes, output.shapes, strict=True)
                ),
            )
    return _outputs(eq)


def _concatenate(eq: Equation) -> list[Label | None]:
    batched = eq.batched()
    _require(eq, len(batched) == len(eq.inputs))
    for _, label in batched:
        _require(eq, label.axis != eq.params["dimension"])
    return _outputs(eq)


def _stack(eq: Equation) -> list[Label | None]:
    batched = eq.batched()
    _require(eq, len(batched) == len(eq.inputs))
    _require(eq, len({label.axis for _, label in batched}) == 1)
    return _outputs(eq)


def _unstack(eq: Equation) -> list[Label | None]:
    for _, label in eq.batched():
        _require(eq, label.axis != eq.params["axis"])
    return _outputs(eq)


def _gather(eq: Equation) -> list[Label | None]:
    numbers, (operand, indices) = eq.params["dimension_numbers"], eq.labels
    (output,) = eq.outputs
    axis = output.batch_axis()
    looked_up = operand is not None and operand.axis >= 0
    chosen_by = indices is not None and indices.axis >= 0
    others = [i for i in range(len(output.shapes[0])) if i not in numbers.offset_dims]
    if chosen_by:
        assert indices is not None
        # A row's own indices: the batch dimension of the result is theirs.
        _require(eq, indices.axis < len(others) and others[indices.axis] == axis)
    if looked_up and chosen_by:
        assert operand is not None and indices is not None
        pairs = zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
        _require(eq, (operand.axis, indices.axis) in set(pairs))
    elif looked_up:
        assert operand is not None
        whole = eq.params["slice_sizes"][operand.axis]
        _require(eq, whole == eq.inputs[0].shapes[0][operand.axis])
        _require(eq, operand.axis not in numbers.start_index_map)
        _require(eq, axis in numbers.offset_dims)
    return _outputs(eq)


def _matrix(eq: Equation) -> list[Label | None]:
    for pair, label in eq.batched():
        _require(eq, label.axis < len(pair.shapes[0]) - 2)
    return _outputs(eq)


def _fourier(eq: Equation) -> list[Label | None]:
    for pair, label in eq.batched():
        last = len(pair.shapes[0]) - len(eq.params["fft_lengths"])
        _require(eq, label.axis < last)
    return _outputs(eq)


def _top_k(eq: Equation) -> list[Label | None]:
    for pair, label in eq.batched():
        rank = len(pair.shapes[0])
        _require(eq, label.axis != eq.params.get("axis", -1) % rank)
    return _outputs(eq)


def _permute(eq: Equation) -> list[Label | None]:
    (output,) = eq.outputs
    for _, label in eq.batched():
        _require(eq, eq.params["permutation"].index(label.axis) == output.batch_axis())
    return _outputs(eq)


def _reverse(eq: Equation) -> list[Label | None]:
    for _, label in eq.batched():
        _require(eq, label.axis not in eq.params["dimensions"])
    return _outputs(eq)


def _dynamic_slice(eq: Equation) -> list[Label | None]:
    """Slices at traced places: the batch dimension must stay whole."""
    operand, *_ = eq.inputs
    for pair, label in eq.batched():
        output = eq.outputs[0]
        _require(eq, pair is operand and label.axis == output.batch_axis())
        _require(eq, pair.shapes[0][label.axis] == output.shapes[0][label.axis])
    return _outputs(eq)


def _dynamic_update_slice(eq: Equation) -> list[Label | None]:
    """Operand and update must both have all rows."""
    places = [label for _, label in eq.batched()]
    _require(eq, len(places) == 2 and places[0].axis == places[1].axis)
    sizes = {pair.shapes[0][label.axis] for pair, label in eq.batched()}
    _require(eq, len(sizes) == 1)
    return _outputs(eq)


def make_walk(rows: tuple[int, int]) -> Walk:
    """A walk that knows all rules, those of loops and branches included."""
    rules: dict[str, Rule] = {}
    makers = frozenset(["broadcast_in_dim", "iota", "cond", "scan", "while"])
    walk = Walk(rules, makers.union(_NOISE, _CALLS), _unknown, rows)

    rules.update(dict.fromkeys(_ELEMENTWISE, _elementwise))
    rules.update(dict.fromkeys(_REDUCTIONS, _reduction))
    rules.update(dict.fromkeys(_ONE_AXIS, _one_axis("axis")))
    rules.update(dict.fromkeys(_NOISE, _noise))
    rules.update(dict.fromkeys(_MATRICES, _matrix))
    rules.update({name: call(walk, key) for name, key in _CALLS.items()})
    rules.update(
        iota=_iota,
        broadcast_in_dim=_broadcast,
        reshape=_reshape,
        transpose=_permute,
        squeeze=_outputs,
        expand_dims=_outputs,
        sort=_one_axis("dimension"),
        dot_general=_dot,
        conv_general_dilated=_convolution,
        reduce_window=_window,
        reduce_window_sum=_window,
        reduce_window_max=_window,
        reduce_window_min=_window,
        select_and_gather_add=_window,
        pad=_pad,
        rev=_reverse,
        slice=_same_size,
        dynamic_slice=_dynamic_slice,
        dynamic_update_slice=_dynamic_update_slice,
        split=_same_size,
        concatenate=_concatenate,
        stack=_stack,
        unstack=_unstack,
        gather=_gather,
        fft=_fourier,
        top_k=_top_k,
        cond=functools.partial(branches, walk),
        scan=functools.partial(scan, walk),
    )
    rules["while"] = functools.partial(loop, walk)
    return walk
