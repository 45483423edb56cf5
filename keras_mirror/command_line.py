"""The `keras-mirror` command.

Nothing here imports a framework at module level: `--help` and wrong arguments
are answered before Keras and JAX, which take seconds to import, are needed.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from keras_mirror.demo.settings import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_DEVICES,
    DEFAULT_EPOCHS,
    DemoError,
    DemoSettings,
    UsageError,
)

_EXIT_CODES = "exit codes: 0 done, 1 the work failed, 2 wrong usage"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `keras-mirror` command.

    Args:
        argv: The arguments after the program's name. None means those of this
            process.

    Returns:
        0 done, 1 the work failed, 2 wrong usage. Results are then on stdout;
        progress and errors are on stderr.

    Example:

    ```python
    exit_code = main(["demo", "--devices", "4", "--json"])
    ```
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    run: Callable[[argparse.Namespace], int | None] = arguments.run
    try:
        return run(arguments) or 0
    except UsageError as error:
        return _fail(arguments.prog, error, 2)
    except DemoError as error:
        return _fail(arguments.prog, error, 1)
    except KeyboardInterrupt:
        return _fail(arguments.prog, "interrupted", 1)


def _fail(prog: str, error: object, code: int) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """argparse's parser, but an error is one line without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keras-mirror",
        description="tf.distribute-like strategies for Keras 3.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_devices(commands)
    _add_launch(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="train on one device and on replicas, and compare",
        description=(
            "Trains a small classifier of images twice, with the same seed and data: "
            "on one device, and on replicas under a strategy. Then prints both "
            "beside each other: accuracy, speed, the largest difference of the "
            "weights, and what each step sends between devices."
        ),
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "--devices",
        type=_positive,
        metavar="N",
        help=(
            "how many devices: the first N accelerators, or N virtual CPU devices "
            f"where there is none (default: all accelerators, or {DEFAULT_DEVICES})"
        ),
    )
    parser.add_argument(
        "--strategy",
        default="mirrored",
        metavar="NAME",
        help="strategy of the replicas (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=_positive,
        default=DEFAULT_EPOCHS,
        metavar="E",
        help="passes over the training data (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=DEFAULT_BATCH_SIZE,
        metavar="B",
        help="global batch: rows per step of all replicas (default: %(default)s)",
    )
    _add_demo_choices(parser)
    parser.set_defaults(run=_run_demo, prog=parser.prog)


def _add_demo_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer",
        default="adam",
        metavar="NAME",
        help=(
            "a Keras optimizer; the weight difference means most with sgd "
            "(default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="digits|mnist|PATH.npz",
        help=(
            "scikit-learn's handwritten digits, MNIST, or your own arrays x_train, "
            "y_train, x_test, y_test (or x, y) (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object to stdout"
    )


def _add_devices(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "devices",
        help="list the devices that JAX sees here",
        description=(
            "Lists the devices that JAX sees here, and the cluster that this process "
            "is in. Other workers are not asked, unless by --join."
        ),
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="list the devices of all workers; start it on each, before the job",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object to stdout"
    )
    parser.set_defaults(run=_run_devices, prog=parser.prog)


def _add_launch(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "launch",
        help="start worker processes that train together",
        description=(
            "Starts a script in several worker processes, which find each other in "
            "MultiWorkerMirroredStrategy(); watches them, and stops all when one "
            "fails. Their output is on stderr, prefixed by rank."
        ),
        epilog=f"{_EXIT_CODES}; or the exit code of the worker that failed first",
    )
    whole = {"type": _positive, "metavar": "N"}
    parser.add_argument("--workers", default=1, help="on this node", **whole)
    parser.add_argument(
        "--devices-per-worker", help="virtual CPU devices of each worker", **whole
    )
    parser.add_argument("--nodes", default=1, help="nodes that launch", **whole)
    parser.add_argument("--node-rank", default=0, type=_whole, metavar="K")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where the workers meet, on node 0 (default: a free port on loopback)",
    )
    parser.add_argument(
        "--max-restarts",
        default=0,
        type=_whole,
        metavar="N",
        help="how often a failed job is started again (default: %(default)s)",
    )
    parser.add_argument("--log-dir", metavar="D", help="keep output as D/rank<k>.log")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="the script (without -m), and arguments",
    )
    parser.set_defaults(run=_run_launch, prog=parser.prog)


def _run_launch(arguments: argparse.Namespace) -> int:
    from keras_mirror.errors import LaunchFailedError, LaunchUsageError
    from keras_mirror.launch.agent import launch
    from keras_mirror.launch.config import LaunchConfig

    command = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if arguments.module is not None:
        command = ["-m", arguments.module, *command]
    try:
        launch(
            LaunchConfig(
                command,
                workers=arguments.workers,
                devices_per_worker=arguments.devices_per_worker,
                nodes=arguments.nodes,
                node_rank=arguments.node_rank,
                coordinator=arguments.coordinator,
                max_restarts=arguments.max_restarts,
                log_dir=arguments.log_dir,
            )
        )
    except LaunchUsageError as error:
        raise UsageError(str(error)) from error
    except LaunchFailedError as error:
        return _fail(arguments.prog, error, error.exit_code)
    return 0


def _whole(text: str, least: int = 0) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {least}. Received: {text!r}"
        )
    return number


def _positive(text: str) -> int:
    return _whole(text, 1)


def _run_demo(arguments: argparse.Namespace) -> None:
    settings = DemoSettings(
        devices=arguments.devices,
        strategy=arguments.strategy,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        optimizer=arguments.optimizer,
        data=arguments.data,
    )
    settings.check()
    settings.prepare_environment()
    # Imported this late because the environment decides the devices and the
    # backend, once, at the frameworks' import.
    from keras_mirror.demo.comparison import compare
    from keras_mirror.demo.report import print_json, print_table

    # Keras announces downloads on stdout, where only the result belongs.
    with contextlib.redirect_stdout(sys.stderr):
        comparison = compare(settings)
    (print_json if arguments.json else print_table)(comparison)


def _run_devices(arguments: argparse.Namespace) -> None:
    if arguments.join:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    from keras_mirror.demo.devices import print_devices

    print_devices(as_json=arguments.json, join=arguments.join)
