"""Says that the chief is out of reach.

Where the network to it is cut, or it hangs, JAX ends the process after the heartbeat's
time with a message that names nobody. On the chief JAX names the silent workers itself.
"""

import sys
import threading
import time

import jax

from keras_mirror._jax import compat

# Two of them fail before JAX ends the process.
_POLLS_PER_HEARTBEAT = 10
_watched: list[threading.Thread] = []


def start(heartbeat_seconds: float) -> None:
    """Watches from a thread of its own, until this process leaves the cluster.

    Args:
        heartbeat_seconds: After how long JAX counts the chief as dead.
    """
    if jax.process_index() == 0 or _watched:
        return
    key = f"keras_mirror/here/{jax.process_index()}"
    compat.client().key_value_set(key, "", True)
    args = (key, heartbeat_seconds / _POLLS_PER_HEARTBEAT)
    _watched.append(threading.Thread(target=_watch, args=args, daemon=True))
    _watched[0].start()


def _watch(key: str, seconds: float) -> None:
    misses, last_heard = 0, time.monotonic()
    while True:
        time.sleep(seconds)
        client = compat.client()
        if client is None:
            return
        try:
            client.blocking_key_value_get(key, int(1000 * seconds))
        except Exception:  # noqa: BLE001  jaxlib has no type of its own for it
            misses += 1
            if misses == 2 and compat.client() is not None:
                _say(time.monotonic() - last_heard)
        else:
            misses, last_heard = 0, time.monotonic()


def _say(seconds: float) -> None:
    print(
        f"keras_mirror: worker {jax.process_index()} has heard nothing from worker 0, "
        f"the chief at {compat.coordinator_address()}, for {seconds:.0f} seconds. See "
        "its log and the network between.",
        file=sys.stderr,
        flush=True,
    )
