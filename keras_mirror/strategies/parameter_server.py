"""Variables that are split over the devices that train."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

from keras_mirror import _engine, errors
from keras_mirror.cluster import ClusterSpec
from keras_mirror.strategies.base import View
from keras_mirror.strategies.reports import Estimates, Summary
from keras_mirror.strategies.workers import AutoShard, WorkersStrategy

SHARDS = ("optimizer", "gradients", "parameters")
Shard = Literal["optimizer", "gradients", "parameters"]


class ParameterServerStrategy(WorkersStrategy):
    """Synchronous training in which every device also serves a part of the variables.

    For models whose variables, with the optimizer's slots, fill the memory of a device.
    The numbers are those of one device. A variable of at least `min_shard_elements`
    elements is split along the longest of its axes that `num_servers` divides; others
    stay whole on each device.

    Args:
        cluster: The workers, as for `MultiWorkerMirroredStrategy`. None looks for a
            cluster; without one all devices of this process train.
        mode: "sync". Asynchronous training ("async") comes with a later version.
        shard: What is split between steps. "optimizer": the optimizer's slots.
            "gradients": these, and gradients leave the backward pass as parts.
            "parameters": these and the weights, which are put together layer by layer
            when a step needs them, twice where the backward pass needs them too.
        num_servers: Over how many devices, side by side, each variable is split; the
            groups of so many devices mirror each other. It must divide the number of
            devices. None: over all devices of all workers. The number of devices of a
            worker keeps the parts of a variable within each worker: then only
            gradients travel between workers.
        min_shard_elements: Variables of fewer elements are not split.
        devices: Names of this process' devices, None for all.
        auto_shard, view, synchronize_batch_norm, timeout_seconds, heartbeat_seconds,
            runtime_options: As for `MultiWorkerMirroredStrategy`.
        num_workers, max_staleness: Of asynchronous training; None until it comes.

    Raises:
        OptionValueError: A value outside of the list of an option.
        ServerCountError: `num_servers` does not divide the number of devices.
        AsynchronousModeError: `mode="async"`, or an option of it.
        ClusterSpecError, ClusterStartError: As for `MultiWorkerMirroredStrategy`.

    Cost: with n devices and weights of P bytes each device sends 2(n - 1)/n P a step,
    as mirrored training does; 3(n - 1)/n P with `shard="parameters"` where the backward
    pass puts weights together again. Memory: slots, with "parameters" also weights,
    take 1/n of what they take on one device.

    Reference: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
    parameter models", 2020 (its stages 1, 2 and 3); Li et al., "Scaling distributed
    machine learning with the parameter server", 2014.

    Example:

    ```python
    strategy = km.ParameterServerStrategy(shard="parameters")
    model.compile("adam", "mse", distribution=strategy)
    model.fit(x, y, batch_size=256)
    print(strategy.summary(model))
    ```
    """

    name = "parameter_server"

    def __init__(
        self,
        cluster: ClusterSpec | None = None,
        *,
        mode: Literal["sync"] = "sync",
        shard: Shard = "optimizer",
        num_servers: int | None = None,
        min_shard_elements: int = 4096,
        devices: Sequence[object] | None = None,
        auto_shard: AutoShard = "auto",
        view: View = "auto",
        synchronize_batch_norm: bool = False,
        timeout_seconds: int = 300,
        heartbeat_seconds: int = 30,
        runtime_options: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        max_staleness: int | None = None,
    ):
        if mode == "async" or max_staleness is not None or num_workers is not None:
            raise errors.AsynchronousModeError(mode, max_staleness, num_workers)
        if mode != "sync":
            raise errors.OptionValueError("mode", mode, ("sync",))
        if shard not in SHARDS:
            raise errors.OptionValueError("shard", shard, SHARDS)
        _check_count("min_shard_elements", min_shard_elements)
        if num_servers is not None:
            _check_count("num_servers", num_servers)
        super().__init__(
            cluster,
            auto_shard=auto_shard,
            view=view,
            synchronize_batch_norm=synchronize_batch_norm,
            timeout_seconds=timeout_seconds,
            heartbeat_seconds=heartbeat_seconds,
            runtime_options=runtime_options,
            devices=devices,
            num_servers=lambda count: _servers(num_servers, count),
        )
        self._shard: Shard = shard
        self._num_servers = _servers(num_servers, len(self.devices))
        self._min_shard_elements = min_shard_elements

    @property
    def mode(self) -> str:
        """How workers train: "sync"."""
        return "sync"

    @property
    def shard(self) -> Shard:
        """What is split between steps."""
        return self._shard

    @property
    def num_servers(self) -> int:
        """Over how many devices each variable is split."""
        return self._num_servers

    @property
    def min_shard_elements(self) -> int:
        """Variables of fewer elements are not split."""
        return self._min_shard_elements

    def summary(self, model: Any) -> Summary:
        """Where each variable of a model lies under this strategy, and how many bytes.

        Args:
            model: A built model; slots are listed once its optimizer has them (after
                the first `fit`).

        Returns:
            A `Summary`: prints as a table, and is a picture in a notebook.

        Raises:
            ModelNotReadyError: The model is not built.

        Example:

        ```python
        print(strategy.summary(model))
        ```
        """
        holdings = _engine.load().holdings(model, self)
        return Summary(self.devices, tuple(holdings))

    def estimate(self, model: Any, batch_size: int = 32) -> Estimates:
        """What training a model would take, for each choice of `shard`.

        Nothing is trained or allocated: sizes come from shapes. Not counted are the
        batch itself, what XLA needs beside these, and weights that are put together
        for a moment.

        Args:
            model: A compiled model that knows the shapes of its inputs.
            batch_size: Rows of the global batch.

        Returns:
            `Estimates`: bytes on each device of parameters, gradients, slots and
            activations. `estimates["parameters"].total` is a number of bytes.

        Raises:
            ModelNotReadyError: The model is not compiled.
            UnknownInputsError: It does not know the shapes of its inputs.
            OptionValueError: `batch_size` is no whole number from 1 on.
        """
        _check_count("batch_size", batch_size)
        return Estimates(tuple(_engine.load().estimates(model, self, batch_size)))

    def held(self) -> list[list[str]]:
        """What each device holds, in words, for pictures of the mesh."""
        count = self.num_servers
        split = {"parameters": "weights and slots"}.get(self.shard, "the slots")
        return [
            [*lines[:-1], f"server {i % count}: 1/{count} of {split}"]
            for i, lines in enumerate(super().held())
        ]

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal strategy."""
        devices = None if self.num_workers > 1 else list(self.devices)
        return {
            **super().get_config(),
            "mode": self.mode,
            "shard": self.shard,
            "num_servers": self.num_servers,
            "min_shard_elements": self.min_shard_elements,
            "devices": devices,
        }


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise errors.OptionKindError(name, value, "a whole number from 1 on")


def _servers(wanted: int | None, devices: int) -> int:
    if wanted is None:
        return devices
    if devices % wanted:
        raise errors.ServerCountError(wanted, devices)
    return wanted
