"""Where random numbers come from: Keras' seed variables and the host's generators."""

import random
import sys
from typing import Any

import numpy as np

# 2**32 over the golden ratio: consecutive replicas get far-away seeds.
STRIDE = 0x9E3779B9


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return (
        variable.name == "seed_generator_state"
        and tuple(variable.shape) == (2,)
        and str(variable.dtype) in ("uint32", "int64")  # JAX, TensorFlow
    )


def host_state() -> dict[str, Any]:
    """The state of `random`, `numpy.random` and, where loaded, torch, for JSON.

    Keras draws from the first two the order in which a fit takes its rows, a
    DataLoader from the third.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = [int(key) for key in np.asarray(keys)]
    numpy = [name, words, int(position), int(has_gauss), float(gauss)]
    version, numbers, gauss_next = random.getstate()
    found = {"numpy": numpy, "python": [version, list(numbers), gauss_next]}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().tolist()
    return found


def set_host_state(state: dict[str, Any]) -> None:
    """Undoes what was drawn since `host_state` returned `state`."""
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
