"""What a worker of `keras_mirror.launch` runs: python -m keras_mirror.launch.call."""

import os
import pathlib
import pickle
import sys

import cloudpickle


def main(folder: str) -> None:
    """Calls what `launch` has put into a folder, and leaves the result there."""
    path = pathlib.Path(folder)
    with open(path / "call.pickle", "rb") as file:
        fn, args, kwargs = pickle.load(file)
    result = fn(*args, **kwargs)
    rank = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]
    with open(path / f"result{rank}.pickle", "wb") as file:
        cloudpickle.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1])
