"""What every strategy has: devices, a mesh, a scope, and custom-loop calls."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import keras

from keras_mirror import _context, _engine, errors
from keras_mirror.display import mesh_html, mesh_text

# Keras exports its distributions, but not the class that they share.
Distribution: Any = keras.distribution.DataParallel.__mro__[1]
AXIS_NAME = "replica"
VIEWS = ("auto", "replica", "global")
View = Literal["auto", "replica", "global"]


def standardize_device(device: object) -> str:
    """Writes a device as Keras does, from any of the usual spellings.

    Args:
        device: "cpu:0", "GPU:1", "/gpu:1", "/device:GPU:1", "gpu" (its first), or
            an object with `platform` and `id`, such as a `jax.Device`.

    Returns:
        A name such as "gpu:1".
    """
    if hasattr(device, "platform") and hasattr(device, "id"):
        return f"{device.platform}:{device.id}"  # pyright: ignore
    name = str(device).lower().rsplit("/", 1)[-1].removeprefix("device:")
    name = name.replace("cuda:", "gpu:")
    return name if ":" in name else f"{name}:0"


def check_device(
    device: object, available: Sequence[str], argument: str = "devices"
) -> str:
    """The name of a device of this process.

    Raises:
        UnknownDeviceError: It does not exist here.
    """
    name = standardize_device(device)
    if name not in available:
        raise errors.UnknownDeviceError(device, available, argument)
    return name


def check_devices(devices: object, available: Sequence[str]) -> list[str]:
    """The devices of a strategy, named and each there once.

    Raises:
        NoDevicesError: The list is empty.
        UnknownDeviceError: A device does not exist here.
        DuplicateDeviceError: A device is named twice.
    """
    if devices is None:
        return list(available)
    if isinstance(devices, (str, bytes)) or hasattr(devices, "platform"):
        devices = [devices]
    if not isinstance(devices, Iterable):
        raise errors.UnknownDeviceError(devices, available)
    names = [check_device(device, available) for device in devices]
    if not names:
        raise errors.NoDevicesError(devices)
    for name in names:
        if names.count(name) > 1:
            raise errors.DuplicateDeviceError(name, names)
    return names


def check_view(view: object) -> None:
    """Raises OptionValueError unless it is one of the three."""
    if view not in VIEWS:
        raise errors.OptionValueError("view", view, VIEWS)


class Strategy(Distribution):
    """Base class: how variables, batches and the step spread over devices.

    A strategy says what goes where; the engine of the backend does it. Pass one to
    `model.compile(distribution=...)`, enter its `scope()`, or make it current with
    `keras_mirror.set_strategy`.

    Args:
        devices: Names of the devices, one replica each.
        view: How a train step is compiled: "replica" (once per replica on its own
            rows), "global" (the one-device program over sharded arrays) or "auto".
        available: Names of the devices to choose from; None for this process'.
        by_worker: Whether the mesh has an axis for the workers.
        num_servers: Over how many devices a variable is split; the mesh then has the
            axes "mirror" and "server".
    """

    name = "strategy"

    def __init__(
        self,
        devices: Sequence[str],
        *,
        view: View = "auto",
        available: Sequence[str] | None = None,
        by_worker: bool = False,
        num_servers: int | None = None,
    ):
        check_view(view)
        if available is None:
            available = _engine.load().local_devices()
        devices = check_devices(devices, available)
        mesh = keras.distribution.DeviceMesh((len(devices),), [AXIS_NAME], devices)
        super().__init__(mesh, batch_dim_name=AXIS_NAME, auto_shard_dataset=False)
        self._devices = tuple(devices)
        self._view: View = view
        self._mesh = _engine.load().make_mesh(
            devices, by_worker=by_worker, num_servers=num_servers
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, in replica order."""
        return self._devices

    @property
    def view(self) -> View:
        """How train steps are compiled; see `MirroredStrategy`."""
        return self._view

    @property
    def mesh(self) -> Any:
        """The backend's mesh (`jax.sharding.Mesh`).

        Its one axis is "replica"; under `MultiWorkerMirroredStrategy` its axes are
        ("worker", "device"), under `ParameterServerStrategy` ("mirror", "server").
        """
        return self._mesh

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas a global batch is divided over."""
        return len(self._devices)

    @property
    def num_model_replicas(self) -> int:
        """The same under the name that `keras.distribution` gives it."""
        return self.num_replicas_in_sync

    @property
    def num_workers(self) -> int:
        """How many processes train together."""
        return 1

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files."""
        return True

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Models compiled inside are bound to this strategy.

        Scopes nest; the innermost counts. The scope belongs to the thread that
        enters it.

        Raises:
            MixedDistributionError: `keras.distribution` has one of another kind.

        Example:

        ```python
        with km.MirroredStrategy().scope():
            model = build()
            model.compile("adam", "mse")
        ```
        """
        before = keras.distribution.distribution()
        if before is not None and not isinstance(before, Strategy):
            raise errors.MixedDistributionError(self, before)
        keras.distribution.set_distribution(self)
        try:
            with _context.scope(self):
                yield self
        finally:
            keras.distribution.set_distribution(before)

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls `fn` once per replica, with the replica axis bound.

        For custom training loops. `fn` is compiled once for arguments of one kind, as
        by `jax.jit`, and again where a global or a variable around it that it names
        was bound to something else; the attributes of objects that it reads are
        those of the first call. Arrays of `args` and `kwargs` that
        `distribute_dataset` sharded reach each replica as its own rows; everything
        else reaches every replica whole.

        Args:
            fn: A function of arrays. Inside, `keras_mirror.replica_context()`
                names the replica and the axis. State goes in and out as values
                (`model.stateless_call`, `optimizer.stateless_apply`). What it
                assigns to Keras variables is put together by each variable's
                `aggregation` (mean where it has none) and assigned afterwards.
            args: Positional arguments: nests of arrays, f32[...] and other dtypes.
            kwargs: Keyword arguments, likewise.

        Returns:
            What `fn` returned, each leaf a `PerReplica` with one value a replica.

        Raises:
            RunArgumentError: `fn` cannot be called, `args` is no tuple or list, or
                `run` is called inside a replica.
        """
        if not callable(fn):
            raise errors.RunArgumentError("`fn` must be callable.", fn)
        if not isinstance(args, (tuple, list)):
            raise errors.RunArgumentError("`args` must be a tuple or list.", args)
        if not isinstance(kwargs, (dict, type(None))):
            raise errors.RunArgumentError("`kwargs` must be a dict.", kwargs)
        if _context.replica_context() is not None:
            raise errors.RunArgumentError(
                "`run` must be called outside of a replica; inside one, call the "
                "function itself.",
                fn,
            )
        return _engine.load().run(self, fn, tuple(args), dict(kwargs or {}))

    def reduce(self, reduce_op: str, value: Any, axis: int | None = None) -> Any:
        """Puts the values of the replicas together.

        Args:
            reduce_op: "sum" or "mean" (any case).
            value: What `run` returned: a `PerReplica`, or a nest of them.
            axis: None to reduce over replicas alone; an integer to reduce each
                replica's value over that axis as well, each row counted once.

        Returns:
            The reduced array, or a nest of them.

        Raises:
            OptionValueError: `reduce_op` is neither "sum" nor "mean".
        """
        op = str(getattr(reduce_op, "value", reduce_op)).lower()
        if op not in ("sum", "mean"):
            raise errors.OptionValueError("reduce_op", reduce_op, ("sum", "mean"))
        return _engine.load().reduce(self, op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the values of the replicas, in replica order.

        Args:
            value: What `run` returned: a `PerReplica`, or a nest of them.
            axis: The axis to concatenate along.

        Returns:
            One array with all replicas' values, or a nest of them.
        """
        return _engine.load().gather(self, value, axis)

    def distribute_dataset(self, dataset: Any) -> Any:
        """Yields the batches of `dataset` with their rows spread over replicas.

        Args:
            dataset: An iterable of nests of arrays whose first axis is the global
                batch, a multiple of the number of replicas: a loop of your own
                runs the same program on equally many rows of each replica. (`fit`
                takes any batch.)

        Returns:
            An iterable of the same batches as arrays of the backend.

        Raises:
            UnevenBatchError: When a batch comes that the replicas do not divide.
        """
        if not isinstance(dataset, Iterable):
            raise errors.RunArgumentError("`dataset` must be an iterable.", dataset)
        return _Distributed(dataset, self)

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """The Keras layout that spreads the first axis over the replicas."""
        axes = [AXIS_NAME] + [None] * (len(data_shape) - 1)
        return keras.distribution.TensorLayout(
            axes[: len(data_shape)], self.device_mesh
        )

    def get_variable_layout(self, variable: Any) -> Any:
        """None: the engine places variables when a step needs them."""
        return None

    def get_tensor_layout(self, path: str) -> Any:
        """None: intermediate tensors stay where the step computes them."""
        return None

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal strategy."""
        return {"devices": list(self.devices), "view": self.view}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Strategy":
        """The strategy that `get_config` described."""
        return cls(**config)

    def __reduce__(self) -> Any:
        # Meshes hold live devices; a copy finds its own.
        return _from_config, (type(self), self.get_config())

    def held(self) -> list[list[str]]:
        """What each device holds, in words, for pictures of the mesh."""
        count = self.num_replicas_in_sync
        return [
            [f"replica {i}", f"rows {i}/{count} of the batch", "all variables"]
            for i in range(count)
        ]

    def __repr__(self) -> str:
        config = self.get_config()
        inner = ", ".join(f"{key}={value!r}" for key, value in config.items())
        return f"{type(self).__name__}({inner})"

    def __str__(self) -> str:
        picture = mesh_text(list(self.devices), self.held(), axis_name=AXIS_NAME)
        return f"{self!r}\n{picture}"

    def _repr_html_(self) -> str:
        return mesh_html(list(self.devices), self.held(), axis_name=AXIS_NAME)


def _from_config(cls: type[Strategy], config: dict[str, Any]) -> Strategy:
    return cls.from_config(config)


class _Distributed:
    """An iterable that can be walked again, unlike a generator."""

    def __init__(self, dataset: Any, strategy: Strategy):
        self._dataset = dataset
        self._strategy = strategy

    def __iter__(self) -> Iterator[Any]:
        return _engine.load().batches(
            self._dataset, self._strategy, may_be_reused=True, must_be_even=True
        )

    def __len__(self) -> int:
        return len(self._dataset)
