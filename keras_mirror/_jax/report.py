"""What a compiled train step sends between devices, counted from its program."""

import math
import re
from typing import Any

import jax
import numpy as np

_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute|collective-broadcast)(-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<shape>[\d,]*)\]")
# Bytes that each of n devices sends per byte of result, ring algorithms (Patarasuk
# and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
# 2009).
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
_BITS = re.compile(r"\d+")
# {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}: groups of two.
_GROUPS = re.compile(
    r"replica_groups=(\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]<="
    r"|mesh\[(?P<mesh>.*?)\] \{(?P<axes>.*?)\})"
)


def _bytes(text: str) -> int:
    total = 0
    for found in _ARRAY.finditer(text):
        dims = [int(size) for size in found["shape"].split(",") if size]
        bits = _BITS.search(found["dtype"])
        width = int(bits.group()) // 8 if bits else 1  # pred has one byte
        total += int(np.prod(dims, dtype=np.int64)) * max(1, width)
    return total


def count(program: str, num_devices: int) -> tuple[int, int]:
    """Collectives in a compiled program and the bytes each device sends.

    Args:
        program: Text of an optimized HLO module.
        num_devices: Devices that take part in a collective that names no groups.

    Returns:
        Number of collectives, bytes sent per device.
    """
    sent, number = 0.0, 0
    for found in _COLLECTIVE.finditer(program):
        number += 1
        line = program[found.start() : program.find("\n", found.end())]
        taking_part = _group_size(line) or num_devices
        sent += _bytes(found["type"]) * _SENT[found["op"]](taking_part)
    return number, round(sent)


def _group_size(line: str) -> int | None:
    found = _GROUPS.search(line)
    if found is None:
        return None
    if found["mesh"]:
        sizes = dict(part.split("=") for part in found["mesh"].split(","))
        return math.prod(int(sizes[axis]) for axis in found["axes"].split(","))
    return int(found["size"] or len(found["first"].split(",")))


def abstract(groups: Any, shardings: Any) -> tuple[list[Any], ...]:
    """Shapes, dtypes and layouts of the groups of a state, without the arrays."""
    return tuple(
        [
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
            for value, sharding in zip(values, of_group, strict=True)
        ]
        for values, of_group in zip(groups, shardings, strict=True)
    )
