"""The threads by which Keras reads a PyDataset ahead stop where they always do.

Keras stops them between epochs, and after it has looked at a first batch to build the
model. What they have asked for by then is what the next epoch begins with, so that
its batches depend on how fast a thread ran: other ones on each worker. Here they are
stopped when as much is asked for as can be, which is what nearly always happens.
"""

import functools
import queue
import time
from collections.abc import Callable
from typing import Any


class _Requests(queue.Queue[Any]):
    """Of one thread, which is seen to wait for room."""

    thread_waits = False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.thread_waits = self.full()
        super().put(item, block, timeout)
        self.thread_waits = False


def stop_in_one_place(adapter: Any) -> None:
    """Makes the batches of `adapter`, of Keras, the same in each run.

    Only of a PyDataset that has an end and that threads or processes read: one without
    an end goes on where it was.
    """
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is not None and adapter.num_batches is not None:
        enqueuer.future_queue = _Requests(enqueuer.future_queue.maxsize)


def stopping_in_one_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Keras' `PyDatasetEnqueuer.stop`."""

    @functools.wraps(original)
    def stop(self: Any, drain_queue_and_join: bool = True) -> Any:
        requests = getattr(self, "future_queue", None)
        if drain_queue_and_join and isinstance(requests, _Requests):
            thread = self.run_thread
            while thread is not None and thread.is_alive():
                if requests.thread_waits:
                    break
                time.sleep(0.001)
        return original(self, drain_queue_and_join)

    return stop
