"""What `strategy.summary` and `strategy.estimate` return."""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_mirror._engine import Estimate, Holding
from keras_mirror.display import bars_html, bytes_text, table_html, table_text

_HEAD = ("variable", "shape", "dtype", "where it lies", "on each device")


@dataclass(frozen=True)
class Summary:
    """Where each variable of a model lies; prints as a table, a picture in notebooks.

    Attributes:
        devices: Their names.
        holdings: One entry a variable, with `path`, `kind` ("weight", "non-trainable
            weight", "slot" or "metric"), `shape`, `dtype`, `place` and
            `bytes_per_device`.
    """

    devices: tuple[str, ...]
    holdings: tuple[Holding, ...]

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """How many bytes each device holds, by its name."""
        return {
            device: sum(holding.bytes_per_device[i] for holding in self.holdings)
            for i, device in enumerate(self.devices)
        }

    def _rows(self) -> list[list[str]]:
        return [
            [
                f"{holding.path} ({holding.kind})",
                "x".join(map(str, holding.shape)) or "scalar",
                holding.dtype,
                holding.place,
                bytes_text(max(holding.bytes_per_device)),
            ]
            for holding in self.holdings
        ]

    def _title(self) -> str:
        return f"{len(self.holdings)} variables on {len(self.devices)} devices"

    def __str__(self) -> str:
        held = self.bytes_per_device.items()
        totals = "\n".join(f"{name}: {bytes_text(count)}" for name, count in held)
        return f"{table_text(self._title(), _HEAD, self._rows())}\n{totals}"

    def _repr_html_(self) -> str:
        bars = bars_html("bytes on each device", list(self.bytes_per_device.items()))
        return bars + table_html(self._title(), _HEAD, self._rows())


@dataclass(frozen=True)
class Estimates:
    """What training a model takes on each device; prints as a table.

    Attributes:
        choices: One entry for mirrored variables (`shard` is None) and one for each
            choice of `shard`, with bytes per device: `parameters`, `gradients`,
            `slots`, `activations` and `total`.
    """

    choices: tuple[Estimate, ...]

    def __getitem__(self, shard: str | None) -> Estimate:
        return next(choice for choice in self.choices if choice.shard == shard)

    def _table(self) -> tuple[str, Sequence[str], list[list[str]]]:
        head = ("shard", "parameters", "gradients", "slots", "activations", "total")
        rows = [
            [choice.shard or "(mirrored)"]
            + [bytes_text(getattr(choice, name)) for name in head[1:]]
            for choice in self.choices
        ]
        return "bytes on each device", head, rows

    def __str__(self) -> str:
        return table_text(*self._table())

    def _repr_html_(self) -> str:
        bars = [(c.shard or "(mirrored)", c.total) for c in self.choices]
        return bars_html("bytes on each device", bars) + table_html(*self._table())
