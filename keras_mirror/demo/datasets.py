"""Images and labels for the demo: digits, MNIST, or the user's own."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_mirror.demo.settings import DemoError, UsageError

_SPLIT_SEED = 0
_FOUR = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class ImageData:
    """Training and validation data of a classification of images.

    Attributes:
        name: What the data is called in the output.
        x_train: f32[rows, ...], scaled to 0..1.
        y_train: i32[rows], classes from 0.
        x_test: f32[rows, ...], scaled like `x_train`.
        y_test: i32[rows].
        num_classes: How many classes there are.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int


def load_data(data: str) -> ImageData:
    """Loads what `--data` names.

    Args:
        data: "digits", "mnist" or the path of an .npz file.

    Returns:
        The data, split, scaled and with classes counted from 0.

    Raises:
        UsageError: The file does not hold images and labels.
        DemoError: A data set is not on this machine and cannot be had.
    """
    if data == "digits":
        arrays = _split(*_digits())
    elif data == "mnist":
        arrays = _mnist()
    else:
        arrays = _from_file(Path(data))
    x_train, y_train, x_test, y_test = arrays
    low, high = _pixel_range(x_train)
    y_train, y_test, num_classes = _classes(data, y_train, y_test)
    return ImageData(
        name=data,
        x_train=_scaled(x_train, low, high),
        y_train=y_train,
        x_test=_scaled(x_test, low, high),
        y_test=y_test,
        num_classes=num_classes,
    )


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DemoError(
            "--data digits needs scikit-learn, which brings the images. Install it: "
            "python -m pip install scikit-learn"
        ) from error
    digits: Any = load_digits()
    return digits["images"], digits["target"]


def _mnist() -> tuple[np.ndarray, ...]:
    import keras

    # Keras raises a bare Exception when the download fails.
    try:
        (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DemoError(
            "MNIST is not in Keras' cache and could not be downloaded "
            f"({reason}). Use --data digits, which needs no network, or "
            "--data PATH.npz with a copy of mnist.npz."
        ) from error
    return x_train, y_train, x_test, y_test


def _from_file(path: Path) -> tuple[np.ndarray, ...]:
    arrays = _read_npz(path)
    if all(name in arrays for name in _FOUR):
        chosen = tuple(arrays[name] for name in _FOUR)
        _check_pair(path, chosen[0], chosen[1], "x_train", "y_train")
        _check_pair(path, chosen[2], chosen[3], "x_test", "y_test")
        _check_same_images(path, chosen[0], chosen[2])
        return chosen
    if "x" in arrays and "y" in arrays:
        _check_pair(path, arrays["x"], arrays["y"], "x", "y")
        if len(arrays["x"]) < 2:
            raise UsageError(
                f"{path}: x must have at least 2 rows, to be split into training and "
                "validation. Received: 1 row."
            )
        return _split(arrays["x"], arrays["y"])
    wanted = _FOUR if any(name in arrays for name in _FOUR) else ("x", "y")
    missing = [name for name in wanted if name not in arrays]
    raise UsageError(
        f"{path} must hold the arrays x_train, y_train, x_test, y_test, or x, y. "
        f"Received: {', '.join(sorted(arrays)) or 'no arrays'}. "
        f"Missing: {', '.join(missing)}."
    )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        # NumPy leaves a file of its own open when it is no whole zip file.
        with path.open("rb") as stream:
            # Reading a pickle would run code of the file's author.
            loaded = np.load(stream, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it holds one bare array")
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{path} cannot be read as an .npz file of plain arrays: {reason}. "
            "Write one with numpy.savez(path, x=..., y=...)."
        ) from error


def _check_pair(path: Path, x: np.ndarray, y: np.ndarray, *names: str) -> None:
    x_name, y_name = names
    received = f"Received: {x_name} {x.dtype}{list(x.shape)}, "
    received += f"{y_name} {y.dtype}{list(y.shape)}."
    if x.ndim < 2 or x.size == 0 or x.dtype.kind not in "biuf":
        rule = f"{x_name} must be numbers of shape [rows, ...], at least one row"
    elif not np.isfinite(x).all():
        rule = f"{x_name} must have no NaN and no infinity"
    elif y.ndim == 2 and y.shape[1] > 1:
        rule = f"{y_name} must be one class a row; for one-hot rows save the argmax(1)"
    elif y.shape[:1] != x.shape[:1] or y.size != len(x):
        rule = f"{x_name} and {y_name} must have the same number of rows"
    elif not _are_classes(y):
        rule = f"{y_name} must be classes, so whole numbers or names"
    else:
        return
    raise UsageError(f"{path}: {rule}. {received}")


def _are_classes(y: np.ndarray) -> bool:
    if y.dtype.kind == "f":
        return np.array_equal(y, np.floor(y))
    return y.dtype.kind in "biuU"


def _check_same_images(path: Path, x_train: np.ndarray, x_test: np.ndarray) -> None:
    if x_train.shape[1:] != x_test.shape[1:]:
        raise UsageError(
            f"{path}: the rows of x_train and x_test must have the same shape. "
            f"Received: x_train {list(x_train.shape)}, x_test {list(x_test.shape)}."
        )


def _split(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    """Four fifths for training and the rest for validation, always the same."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(x))
    test_rows = max(1, len(x) // 5)
    test, train = order[:test_rows], order[test_rows:]
    return x[train], y[train], x[test], y[test]


def _pixel_range(x: np.ndarray) -> tuple[float, float]:
    if x.dtype == np.uint8:
        return 0.0, 255.0
    low, high = float(x.min()), float(x.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _scaled(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return ((x.astype("float32") - low) / ((high - low) or 1.0)).astype("float32")


def _classes(
    data: str, y_train: np.ndarray, y_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Numbers the classes from 0, whatever numbers or names the labels are."""
    labels = np.concatenate([y_train.reshape(-1), y_test.reshape(-1)])
    names, numbers = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise UsageError(
            f"{data}: the labels must name at least 2 classes. "
            f"Received: {names.tolist()}."
        )
    numbers = numbers.astype("int32")
    return numbers[: len(y_train)], numbers[len(y_train) :], len(names)
