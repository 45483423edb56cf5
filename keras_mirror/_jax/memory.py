"""How many bytes each device holds, from shapes alone; nothing runs."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import keras

from keras_mirror import _context, errors
from keras_mirror._engine import Estimate, Holding
from keras_mirror._jax.sharded import axis_of, groups_of, is_central, layout_of

_KINDS = ("weight", "non-trainable weight", "slot", "metric")


def _bytes(shape: Any, dtype: Any) -> int:
    return math.prod(shape) * jax.numpy.dtype(dtype).itemsize


def _place(axis: int | None, shape: tuple[int, ...], strategy: Any) -> str:
    if axis is None:
        return "whole on each device"
    servers = strategy.num_servers
    return f"axis {axis} split: {shape[axis] // servers} of {shape[axis]} each"


def holdings(model: Any, strategy: Any) -> list[Holding]:
    """Of each variable that `model` has now, where `strategy` keeps it."""
    if not isinstance(model, keras.Model) or not model.built:
        raise errors.ModelNotReadyError("A summary", model, "built")
    groups = groups_of(model)
    kinds = _KINDS[: len(groups)]
    layout = layout_of(model, strategy)
    if is_central(strategy):
        return _in_storage(groups, kinds, strategy)
    shardings = layout.of_state([len(group) for group in groups])
    axes = (layout.parameters, layout.others, layout.slots, ())
    found = []
    for kind, group, of_group, split in zip(
        kinds, groups, shardings, axes, strict=False
    ):
        for i, variable in enumerate(group):
            shape = tuple(variable.shape)
            axis = split[i] if split else None
            part = _bytes(of_group[i].shard_shape(shape), variable.dtype)
            found.append(
                Holding(
                    path=variable.path,
                    kind=kind,
                    shape=shape,
                    dtype=str(variable.dtype),
                    place=_place(axis, shape, strategy),
                    bytes_per_device=(part,) * strategy.num_replicas_in_sync,
                )
            )
    return found


def _in_storage(groups: Any, kinds: Any, strategy: Any) -> list[Holding]:
    return [
        Holding(
            path=variable.path,
            kind=kind,
            shape=tuple(variable.shape),
            dtype=str(variable.dtype),
            place=f"on {strategy.storage_device}",
            bytes_per_device=tuple(
                _bytes(variable.shape, variable.dtype)
                * (device == strategy.storage_device)
                for device in strategy.all_places
            ),
        )
        for kind, group in zip(kinds, groups, strict=True)
        for variable in group
    ]


def _slots_of(model: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each variable that the optimizer has, or is to have."""
    optimizer = getattr(model.optimizer, "inner", model.optimizer)
    if not optimizer.built:
        new = type(optimizer).from_config(optimizer.get_config())
        # Traced: no slot is made.
        jax.eval_shape(lambda: new.build(model.trainable_variables))
        optimizer = new
    return [(tuple(v.shape), str(v.dtype)) for v in optimizer.variables]


def _residuals(model: Any, x: Any) -> int:
    """Bytes that the backward pass keeps of a forward pass over `x`."""
    weights = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def kept(weights: Any, others: Any, x: Any) -> Any:
        def forward(weights: Any) -> Any:
            return model.stateless_call(weights, others, x, training=True)[0]

        return jax.vjp(forward, weights)[1]

    program = jax.make_jaxpr(kept)(*jax.eval_shape(lambda: (weights, others, x)))
    given = set(map(id, program.jaxpr.invars))
    made = {
        id(v): v.aval
        for v in program.jaxpr.outvars
        if not hasattr(v, "val") and id(v) not in given
    }
    return sum(_bytes(aval.shape, aval.dtype) for aval in made.values())


def _example(model: Any, rows: int) -> Any:
    """Inputs of so many rows, as shapes."""
    # A Sequential model has its own as a functional one.
    functional = getattr(model, "_functional", None) or model
    known = getattr(functional, "_inputs_struct", None)
    if getattr(model, "optimizer", None) is None:
        raise errors.ModelNotReadyError("An estimate", model, "compiled")
    if known is None:
        raise errors.UnknownInputsError(model.name)

    def of(tensor: Any) -> jax.ShapeDtypeStruct:
        shape = (rows, *tensor.shape[1:])
        if None in shape:
            raise errors.UnknownInputsError(model.name)
        return jax.ShapeDtypeStruct(shape, tensor.dtype)

    return jax.tree.map(of, known)


def _total(arrays: Any, strategy: Any, *, is_split: bool) -> int:
    """Bytes of these on one device, each split where it can be, or none."""
    total = 0
    for shape, dtype in arrays:
        axis = axis_of(shape, dtype, strategy) if is_split else None
        servers = 1 if axis is None else strategy.num_servers
        total += _bytes(shape, dtype) // servers
    return total


def estimates(model: Any, strategy: Any, batch_size: int) -> Iterator[Estimate]:
    """For mirrored variables and for each choice of `shard`: bytes per device."""
    example = _example(model, -(-batch_size // strategy.num_replicas_in_sync))
    groups = _context.internals().state_variables(model, 2)
    weights, others = (
        [(tuple(v.shape), str(v.dtype)) for v in group] for group in groups
    )
    slots = _slots_of(model)
    activations = _residuals(model, example)
    for shard in (None, "optimizer", "gradients", "parameters"):
        are_parts = shard in ("gradients", "parameters")
        whole = {"is_split": shard == "parameters"}
        yield Estimate(
            shard=shard,
            parameters=_total(weights + others, strategy, **whole),
            gradients=_total(weights, strategy, is_split=are_parts),
            slots=_total(slots, strategy, is_split=shard is not None),
            activations=activations,
        )
