"""What an uncaught error leaves behind for the launcher: when it was, and its text.

Workers fail of each other's failures and may end in any order, so the time at which
each raised says which was the cause.
"""

import contextlib
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from types import TracebackType

VARIABLE = "KERAS_MIRROR_FAILURE_FILE"


@dataclass(frozen=True)
class Failure:
    """An uncaught error.

    Attributes:
        at: Seconds since the epoch.
        text: Its traceback.
    """

    at: float
    text: str


def read(path: pathlib.Path) -> Failure | None:
    """What a worker has left there, None where nothing."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Failure(**json.loads(path.read_text()))
    return None


def record_uncaught(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets an uncaught error of this process be recorded, where a launcher asks.

    Args:
        environment: Environment variables; the launcher's is taken out, since it is
            not meant for processes that this one starts.
    """
    path = environment.pop(VARIABLE, None)
    if not path:
        return
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        with contextlib.suppress(OSError):
            partial = pathlib.Path(f"{path}.partial")
            partial.write_text(json.dumps(asdict(Failure(time.time(), text))))
            partial.replace(path)
        before(kind, error, trace)

    sys.excepthook = hook
