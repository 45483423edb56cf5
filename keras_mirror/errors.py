"""Every exception and warning of keras_mirror.

Each class takes the values that decided the refusal and builds the message: the
rule that was broken, what was received, and the edit that fixes it.
"""

import difflib
import types
from collections.abc import Iterable, Sequence


class KerasMirrorError(Exception):
    """Base class of all errors that keras_mirror raises on purpose."""


class UnknownStrategyError(KerasMirrorError, ValueError):
    """A strategy was asked for by a name that no strategy has."""

    def __init__(self, name: str, known: Iterable[str], source: str):
        known = sorted(known)
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        super().__init__(
            f"{source} must name a known strategy. Received: {name!r}. "
            f"{hint}Known names: {', '.join(map(repr, known))}."
        )


class StrategyTypeError(KerasMirrorError, TypeError):
    """Something that is neither a strategy nor the name of one."""

    def __init__(self, value: object, source: str):
        super().__init__(
            f"{source} must be a keras_mirror strategy, the name of one, a "
            "`keras.distribution.Distribution` (in `compile` alone) or None. "
            f"Received: {value!r} of type {type(value).__name__}. "
            'Pass for example "mirrored" or keras_mirror.MirroredStrategy().'
        )


class UnknownDeviceError(KerasMirrorError, ValueError):
    """A device that this process does not have."""

    def __init__(
        self, device: object, available: Sequence[str], argument: str = "devices"
    ):
        super().__init__(
            f"`{argument}` must name devices of this process. "
            f"Received: {device!r}. Available: {', '.join(available)}. "
            f"Name one of those, or leave `{argument}` out. (Virtual CPU devices are "
            "made before JAX is first used, with XLA_FLAGS="
            "--xla_force_host_platform_device_count=N.)"
        )


class DuplicateDeviceError(KerasMirrorError, ValueError):
    """The same device twice in one strategy."""

    def __init__(self, device: str, devices: Sequence[str]):
        super().__init__(
            "Each device holds one replica, so `devices` must name it once. "
            f"Received: {device!r} more than once in devices={list(devices)!r}. "
            "Remove the repetition."
        )


class NoDevicesError(KerasMirrorError, ValueError):
    """An empty list of devices."""

    def __init__(self, devices: object):
        super().__init__(
            "A strategy needs at least one device. "
            f"Received: devices={devices!r}. Leave `devices` out to use all."
        )


class UnsupportedBackendError(KerasMirrorError, RuntimeError):
    """The backend that Keras runs on has no engine for this strategy."""

    def __init__(self, backend: str, supported: Sequence[str]):
        super().__init__(
            f"keras_mirror strategies run on the Keras backends "
            f"{', '.join(map(repr, supported))}. Received: backend={backend!r}. "
            f"Set KERAS_BACKEND={supported[0]} before keras is imported."
        )


class UnsupportedOnBackendError(KerasMirrorError, NotImplementedError):
    """What runs on another backend only."""

    def __init__(self, what: str):
        super().__init__(
            f"{what} does not run on the TensorFlow backend yet. Received: a call of "
            "it there. Set KERAS_BACKEND=jax before keras is imported."
        )


class MixedDistributionError(KerasMirrorError, RuntimeError):
    """A strategy and a `keras.distribution` of another kind at once."""

    def __init__(self, strategy: object, distribution: object):
        super().__init__(
            "A model is distributed either by a keras_mirror strategy or by "
            "`keras.distribution`, not by both. "
            f"Received: strategy={strategy!r} while "
            f"keras.distribution.distribution()={distribution!r}. Call "
            "keras.distribution.set_distribution(None) first, or pass the Keras "
            "distribution itself as model.compile(distribution=...)."
        )


class OptionValueError(KerasMirrorError, ValueError):
    """An option with a value outside its list."""

    def __init__(self, option: str, value: object, allowed: Sequence[object]):
        text = ", ".join(map(repr, allowed))
        super().__init__(
            f"`{option}` must be one of {text}. Received: {option}={value!r}."
        )


class OptionKindError(OptionValueError):
    """An option with a value of another kind, such as a text for a number."""

    def __init__(self, option: str, value: object, kind: str):
        ValueError.__init__(
            self, f"`{option}` must be {kind}. Received: {option}={value!r}."
        )


class IncompatibleOptionsError(KerasMirrorError, ValueError):
    """Two options of which one would have no effect beside the other."""

    def __init__(self, first: str, second: str, why: str, fix: str):
        super().__init__(f"{why} Received: {first} together with {second}. {fix}")


class ServerCountError(KerasMirrorError, ValueError):
    """Servers that do not divide the devices."""

    def __init__(self, num_servers: int, devices: int):
        fits = [n for n in range(1, devices + 1) if devices % n == 0]
        super().__init__(
            "Every group of servers has equally many devices, so `num_servers` must "
            f"divide their number. Received: num_servers={num_servers} with {devices} "
            "devices. Use one of "
            f"{', '.join(map(str, fits))}."
        )


class MissingPackageError(KerasMirrorError, ImportError):
    """Something was asked for that an extra package does."""

    def __init__(self, what: str, package: str):
        super().__init__(
            f"{what} needs a package that is not installed. Received: no {package}. "
            f"Install it: pip install {package}."
        )


class CheckpointError(KerasMirrorError, ValueError):
    """A checkpoint that is not there, or is of another model."""

    def __init__(self, directory: str, found: str, steps: Iterable[int]):
        super().__init__(
            "A checkpoint must be there, and of a model of the same variables. "
            f"Received: {directory!r} with {found}. Its steps: "
            f"{', '.join(map(str, steps)) or 'none'}. Name one of these, and build the "
            "model as it was when it was saved, with the same optimizer."
        )


class ModelNotReadyError(KerasMirrorError, ValueError):
    """Something was asked of a model that is no model, not built, or not compiled."""

    _FIXES = {
        "built": "Call it on a batch, or give it a keras.Input, before.",
        "compiled": "Call model.compile(...) before.",
    }

    def __init__(self, what: str, model: object, lacks: str):
        name = getattr(model, "name", model)
        super().__init__(
            f"{what} needs a model that is {lacks}. Received: {name!r}, which is not. "
            f"{self._FIXES[lacks]}"
        )


class UnknownInputsError(KerasMirrorError, ValueError):
    """A model of which the size of a batch cannot be told."""

    def __init__(self, model: str):
        super().__init__(
            "An estimate needs a model that knows the shape of its inputs. Received: "
            f"the model {model!r}, not built from keras.Input, or with inputs whose "
            "axes beside the first have no size. Build it with keras.Input((...)) of "
            "known sizes."
        )


class AsynchronousModeError(KerasMirrorError, ValueError):
    """Asynchronous training, which this version does not have."""

    def __init__(self, mode: object, max_staleness: object, num_workers: object):
        options = {
            "mode": mode,
            "max_staleness": max_staleness,
            "num_workers": num_workers,
        }
        given = [f"{name}={v!r}" for name, v in options.items() if v is not None]
        super().__init__(
            "This version of keras_mirror trains synchronously. Received: "
            f'{", ".join(given)}. Use mode="sync" without max_staleness and '
            "num_workers: all workers apply every step's gradients together."
        )


class ReplicaViewError(KerasMirrorError, ValueError):
    """`view="replica"` was asked for a step that cannot run once per replica."""

    def __init__(self, reason: str):
        super().__init__(
            'With view="replica" the step runs once per replica on that '
            "replica's rows alone, and its results are put together afterwards. "
            f"Received: a model for which this is impossible: {reason}. "
            'Use view="auto" or view="global".'
        )


class ReplicaAxisError(KerasMirrorError, RuntimeError):
    """Which replicas to reduce over cannot be told from the surroundings."""

    def __init__(self, axis_name: str | tuple[str, ...] | None, bound: Sequence[str]):
        if axis_name is None:
            rule = "Several mapped axes are bound, so the one to reduce over "
            rule += "must be named."
        else:
            rule = "The named axis must be bound where gradients are applied."
        super().__init__(
            f"{rule} Received: axis_name={axis_name!r}, bound axes: "
            f"{list(bound)!r}. Pass DistributedOptimizer(..., axis_name=...) the "
            "axis name of your `jax.shard_map` or `jax.pmap`."
        )


class NotAnOptimizerError(KerasMirrorError, TypeError):
    """DistributedOptimizer around something that is no Keras optimizer."""

    def __init__(self, value: object):
        super().__init__(
            "DistributedOptimizer wraps one Keras optimizer (or the name of "
            f"one). Received: {value!r} of type {type(value).__name__}. "
            "Pass for example keras.optimizers.SGD(0.1)."
        )


class NestedDistributedOptimizerError(KerasMirrorError, ValueError):
    """A DistributedOptimizer around another: gradients would reduce twice."""

    def __init__(self, value: object):
        super().__init__(
            "Gradients are reduced once, by the outermost optimizer. "
            f"Received: a DistributedOptimizer around {value!r}. Wrap the plain "
            "optimizer instead."
        )


class PerReplicaValueError(KerasMirrorError, ValueError):
    """`reduce` or `gather` of something that has no value per replica."""

    def __init__(self, method: str, detail: str):
        super().__init__(f"`strategy.{method}` cannot use this value: {detail}")


class RunArgumentError(KerasMirrorError, TypeError):
    """A custom-loop call with arguments of the wrong kind, or in a wrong place."""

    def __init__(self, rule: str, value: object):
        super().__init__(f"{rule} Received: {value!r} of type {type(value).__name__}.")


class UnevenBatchError(KerasMirrorError, ValueError):
    """A custom loop got a batch that the replicas do not divide."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], num_replicas: int):
        super().__init__(
            "In a loop of your own each replica runs the same program on equally many "
            "rows, so all arrays of a batch must have one number of rows, a multiple "
            f"of the replicas. Received: arrays of shapes {list(shapes)} for "
            f"{num_replicas} replicas. Drop or pad the last batch (for example "
            "dataset.batch(n, drop_remainder=True)); `fit` takes any batch."
        )


class IndivisibleBatchError(KerasMirrorError, ValueError):
    """`keras.distribution` got a batch that its devices do not divide."""

    def __init__(self, distribution: object, cause: object):
        shown = distribution or "the current keras.distribution"
        first = str(cause).strip().splitlines()[0]
        super().__init__(
            "Under `keras.distribution` the devices must divide every batch. "
            f"Received: {shown!r} and a batch for which {first} Choose another "
            'batch_size, or distribution="mirrored", which takes any batch.'
        )


class UntestedKerasWarning(UserWarning):
    """Keras has a version that keras_mirror has not been tested with."""

    def __init__(self, version: str, lowest: str, highest: str):
        super().__init__(
            f"keras_mirror is tested with Keras {lowest} to {highest}. Received: "
            f"Keras {version}. Training may differ from one device; compare once, "
            f"or install keras>={lowest},<={highest}."
        )


class StrategySetAsideWarning(UserWarning):
    """A `keras.distribution` was set after the switch or the environment."""

    def __init__(self, strategy: object, distribution: object):
        super().__init__(
            "`keras.distribution.set_distribution` governs the models compiled "
            f"under it, and the current strategy does not. Received: {distribution!r} "
            f"while the strategy is {strategy!r}. Call "
            "keras.distribution.set_distribution(None) to train under the strategy."
        )


class ClusterSpecError(KerasMirrorError, ValueError):
    """A cluster that is described wrongly."""

    def __init__(self, source: str, field: str, value: object, rule: str):
        super().__init__(
            f"{source} describes the cluster wrongly at {field}. {rule} "
            f"Received: {value!r}."
        )


class RuntimeOptionError(KerasMirrorError, ValueError):
    """An option that `jax.distributed.initialize` cannot be given here."""

    def __init__(self, option: object, version: str, why: str, fix: str):
        super().__init__(
            f"`runtime_options` are keyword arguments of jax.distributed.initialize. "
            f"{why} Received: {option!r} with JAX {version}. {fix}"
        )


class ClusterStartError(KerasMirrorError, RuntimeError):
    """The workers of a cluster did not come together."""

    def __init__(self, coordinator: str | None, what: str, fix: str):
        super().__init__(f"{what} Received: coordinator={coordinator!r}. {fix}")


class LateWorkerError(KerasMirrorError, RuntimeError):
    """Workers that others have waited for in vain."""

    def __init__(self, what: str, late: Sequence[int], count: int, seconds: float):
        names = ", ".join(f"worker {index}" for index in late)
        super().__init__(
            f"All {count} workers must come to the same point of the program: {what}. "
            f"Received nothing from {names} within {seconds:g} seconds. "
            "See the logs of that worker: it died, hangs, or runs another program."
        )


class WorkersDifferError(KerasMirrorError, RuntimeError):
    """Workers that bring different things to where they must agree."""

    _FIXES = types.MappingProxyType(
        {
            "place of the program": "Let every worker make the same calls, in the same "
            "order.",
            "learning rate": "Set it on one worker, or alike on all.",
            "variables": "Let every worker build and compile the same model, and set "
            "the same weights.",
            "step": "Let every worker build and compile the same model.",
        }
    )

    def __init__(self, what: str, values: Sequence[object]):
        listed = "; ".join(f"worker {i}: {value}" for i, value in enumerate(values))
        fix = self._FIXES.get(
            what,
            "Give every worker the same data and the same arguments; with "
            'auto_shard="off", parts of one kind and equally many of them.',
        )
        super().__init__(
            f"All workers must bring the same {what}, since each computes its rows of "
            f"one global batch. Received: {listed}. {fix}"
        )


class FileShardError(KerasMirrorError, ValueError):
    """Data that have no files to share out between the workers."""

    def __init__(self, received: str):
        super().__init__(
            'With auto_shard="file" each worker reads files of its own, so the data '
            "must be a tf.data dataset that reads files, at least one for each worker, "
            f"and yields batches of dense tensors. Received: {received}. Write more "
            'files, or use auto_shard="data" (every worker reads all, the numbers are '
            'one device\'s) or "off" (each worker brings its part).'
        )


class AloneWarning(UserWarning):
    """A strategy for many workers in a process that is alone."""

    def __init__(self) -> None:
        super().__init__(
            "MultiWorkerMirroredStrategy found no cluster and runs with one worker. "
            "Set TF_CONFIG or KERAS_DISTRIBUTION_*, pass a ClusterSpec, or start the "
            "program with a scheduler."
        )


class SeparateModelsWarning(UserWarning):
    """A strategy of one process where several processes were started together."""

    def __init__(self, strategy: str, index: object, count: object, source: str):
        super().__init__(
            f"{strategy} trains on the devices of one process, and this is worker "
            f"{index} of {count} (by {source}): each of them trains a model of its "
            "own, and they write to the same files. MultiWorkerMirroredStrategy and "
            "ParameterServerStrategy train one model."
        )


class DifferentBatchesWarning(UserWarning):
    """Workers that take their rows of batches with different contents."""

    def __init__(self, workers: Sequence[int]):
        names = ", ".join(f"worker {index}" for index in workers)
        super().__init__(
            "Each worker computes its rows of one global batch, so all must have the "
            "same batches in the same order. Received: batches of the same shapes with "
            f"other contents on {names} than on the chief. Training goes on, but in an "
            "epoch some rows count more than once and others never. Let all shuffle "
            "alike (keras.utils.set_random_seed at the top of the program, or a seed "
            'for the shuffle), or give each worker its own rows with auto_shard="off".'
        )


class WorkerFailedError(KerasMirrorError, RuntimeError):
    """Another worker raised an error; this one stops with it."""

    def __init__(self, index: int, said: str):
        super().__init__(
            f"Workers train together, and worker {index} has failed. "
            f"Received: {said}. See the log of that worker."
        )


class PreemptedExit(SystemExit):
    """A worker got SIGTERM: all leave at the same step, with one exit code.

    The launcher starts the job again without counting a failure.
    """

    EXIT_CODE = 75

    def __init__(self, leaving: Sequence[int]):
        super().__init__(self.EXIT_CODE)
        names = ", ".join(f"worker {index}" for index in leaving)
        self.message = f"All workers leave, since {names} got SIGTERM."


class InconsistentVariableError(KerasMirrorError, RuntimeError):
    """A variable that differs where all copies must be equal."""

    def __init__(self, path: str, places: Sequence[str]):
        super().__init__(
            "All replicas and workers must hold equal variables. Received: "
            f"{path!r} differs on {', '.join(places)} from the chief's first replica. "
            "Something has changed one copy alone: an assignment on one worker, code "
            "in a replica that draws its own numbers, or a faulty device."
        )


class LaunchUsageError(KerasMirrorError, ValueError):
    """A launch that was asked for wrongly."""


class LaunchFailedError(KerasMirrorError, RuntimeError):
    """A worker failed; the launch has stopped the others.

    Attributes:
        exit_code: What the launcher ends with.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
