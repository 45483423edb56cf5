"""Two compiled models that share layers and train in turn."""

import keras
import numpy as np
from keras import layers
from parity import (
    assert_same,
    device_count,
    fit,
    mirrored,
    numbers,
    run_on_one_device,
    run_on_replicas,
    sgd,
)

STEPS, HALF = 4, 8


def adversaries(compile_all):
    """A generator, its judge, and both in one model, as in the classic GAN."""
    judge = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="leaky_relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    generator = keras.Sequential(
        [keras.Input((3,)), layers.Dense(8, activation="tanh"), layers.Dense(6)]
    )
    noise = keras.Input((3,))
    compile_all(judge)
    both = keras.Model(noise, judge(generator(noise)))
    return judge, generator, both


def compile_all(model):
    model.compile(optimizer=sgd(0.05), loss="binary_crossentropy", metrics=["accuracy"])


def play(models, rows=HALF):
    """Trains the judge, then the generator through the frozen judge, in turn."""
    judge, generator, both = models
    real = numbers(STEPS * rows)[0] + 1.0
    noise = numbers(STEPS * rows, inputs=3, seed=4)[0]
    labels = np.concatenate([np.ones((rows, 1)), np.zeros((rows, 1))])
    logs = []
    for step in range(STEPS):
        part = slice(step * rows, (step + 1) * rows)
        fake = generator.predict(noise[part], verbose=0)
        mixed = np.concatenate([real[part], fake])
        logs.append(judge.train_on_batch(mixed, labels, return_dict=True))
        logs.append(both.train_on_batch(noise[part], labels[:rows], return_dict=True))
    return logs


def gan(rows, scope):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with scope:
        models = adversaries(compile_all)
        judge, _, both = models
        judge.trainable = False
        compile_all(both)
        judge.trainable = True
        compile_all(judge)
    logs = play(models, rows)
    return models, {
        "logs": logs,
        "judge": judge.get_weights(),
        "both": both.get_weights(),
        "slots": [np.array(v.value) for v in both.optimizer.variables],
    }


class plain_scope:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


def check_gan(rows):
    one, want = gan(rows, plain_scope())
    many, got = gan(rows, mirrored().scope())
    assert device_count(one[0]) == 1
    assert [device_count(model) for model in many] == [4, 4, 4]
    assert_same("gan", got, want)


def test_gan_matches_one_device():
    check_gan(HALF)


def test_gan_with_uneven_batches_matches_one_device():
    check_gan(5)


def test_encoder_shared_by_two_tasks_matches_one_device():
    """Two heads on one encoder, each fitted in its own call."""
    x, y = numbers()

    def build():
        inputs = keras.Input((6,))
        code = layers.Dense(8, activation="tanh")(inputs)
        first = keras.Model(inputs, layers.Dense(1)(code))
        second = keras.Model(inputs, layers.Dense(1)(code))
        first.second = [second]  # in a list of its own: not a layer of `first`
        second.compile(optimizer=sgd(0.05), loss="mae")
        return first

    def drive(model):
        second = model.second[0]
        history = [fit(x, y, epochs=1)(m) for m in (model, second, model, second)]
        return {"history": history, "second": second.get_weights()}

    def compile_args():
        return {"optimizer": sgd(), "loss": "mse"}

    want = run_on_one_device(build, compile_args, drive)
    got = run_on_replicas(build, compile_args, drive)
    assert device_count(got.model) == device_count(got.model.second[0]) == 4
    assert_same("result", got.result, want.result)
    assert_same("weights", got.model.get_weights(), want.model.get_weights())
