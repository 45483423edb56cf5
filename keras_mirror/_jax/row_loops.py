"""What loops, branches and calls do to the rows of a batch."""

from typing import Any

from keras_mirror._jax.rows import Equation, Label, RowsMix, Rule, Walk


def _join(one: Label | None, two: Label | None) -> Label | None:
    """What is known of a value that is one or the other."""
    if one == two or two is None:
        return one
    if one is None:
        return two
    if one.axis != two.axis:
        raise RowsMix("a loop or branch combines different rows of the batch")
    if "uniform" in (one.kind, two.kind):
        return one if two.kind == "uniform" else two
    raise RowsMix("a loop or branch combines different rows of the batch")


def _inner(label: Label | None) -> Label | None:
    if label is None or label.axis < 0:
        return label
    if label.axis == 0:
        raise RowsMix("a loop runs over the rows of the batch")
    return Label(label.kind, label.axis - 1, label.outer)


def _outer(label: Label | None) -> Label | None:
    if label is None or label.axis < 0:
        return label
    return Label(label.kind, label.axis + 1, label.outer)


def call(walk: Walk, key: str) -> Rule:
    """A primitive that calls another program."""

    def rule(eq: Equation) -> list[Label | None]:
        small, large = eq.params[key], eq.large_params[key]
        if hasattr(small, "consts"):
            return walk.closed(small, large, eq.labels)
        return walk.open(small, large, eq.labels)

    return rule


def branches(walk: Walk, eq: Equation) -> list[Label | None]:
    """`cond`: the choice must not depend on the batch."""
    chooser, *labels = eq.labels
    if chooser is not None:
        raise eq.mix()
    pairs = zip(eq.params["branches"], eq.large_params["branches"], strict=True)
    results = [walk.closed(a, b, labels) for a, b in pairs]
    joined = results[0]
    for other in results[1:]:
        joined = list(map(_join, joined, other))
    return joined


def _settle(body: Any, carry: list[Label | None]) -> tuple[Any, Any]:
    """Runs a loop body until the labels of what it carries stop changing."""
    for _ in range(4):
        carried, rest = body(carry)
        merged = list(map(_join, carry, carried))
        if merged == carry:
            return carry, rest
        carry = merged
    raise RowsMix("a loop combines different rows of the batch")


def scan(walk: Walk, eq: Equation) -> list[Label | None]:
    """`scan`: rows may not be what it runs over."""
    consts, carries = eq.params["num_consts"], eq.params["num_carry"]
    if eq.params["length"] != eq.large_params["length"]:
        raise RowsMix("a loop runs over the rows of the batch")
    fixed = eq.labels[:consts]
    slices = [_inner(label) for label in eq.labels[consts + carries :]]

    def body(carry: list[Label | None]) -> tuple[Any, Any]:
        found = walk.closed(
            eq.params["jaxpr"],
            eq.large_params["jaxpr"],
            [*fixed, *carry, *slices],
        )
        return found[:carries], found[carries:]

    carry, stacked = _settle(body, eq.labels[consts : consts + carries])
    return [*carry, *map(_outer, stacked)]


def loop(walk: Walk, eq: Equation) -> list[Label | None]:
    """`while`: its length must not depend on the batch."""
    tests, bodies = eq.params["cond_nconsts"], eq.params["body_nconsts"]
    test_consts = eq.labels[:tests]
    body_consts = eq.labels[tests : tests + bodies]

    def body(carry: list[Label | None]) -> tuple[Any, Any]:
        found = walk.closed(
            eq.params["body_jaxpr"],
            eq.large_params["body_jaxpr"],
            [*body_consts, *carry],
        )
        return found, None

    carry, _ = _settle(body, eq.labels[tests + bodies :])
    (going_on,) = walk.closed(
        eq.params["cond_jaxpr"],
        eq.large_params["cond_jaxpr"],
        [*test_consts, *carry],
    )
    if going_on is not None:
        raise eq.mix()
    return carry
