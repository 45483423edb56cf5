"""A script that launches a function of its own."""

import json
import sys


def found(scale, *, shift):
    import training

    import keras_mirror as km

    strategy = km.MultiWorkerMirroredStrategy()
    km.set_strategy(strategy)
    trained = training.run("data: arrays")
    history = {name: list(map(float, v)) for name, v in trained["history"].items()}
    return {
        "history": history,
        "place": [strategy.worker_index, strategy.num_workers],
        "scaled": strategy.worker_index * scale + shift,
    }


def fails():
    import keras_mirror as km

    if km.MultiWorkerMirroredStrategy().worker_index == 1:
        raise ValueError("no such shard")


if __name__ == "__main__":
    import keras_mirror as km

    if sys.argv[1] == "found":
        result = km.launch(found, (10,), {"shift": 3}, workers=2, devices_per_worker=2)
        print(json.dumps(result))
    else:
        try:
            km.launch(fails, workers=2)
        except km.errors.LaunchFailedError as error:
            print(json.dumps([str(error), error.exit_code]))
