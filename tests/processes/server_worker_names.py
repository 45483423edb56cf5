"""The programs that workers with split variables run."""

NAMES = [
    "data: shuffled",
    "data: arrays",
    "unbuilt",
    "whole-batch mean",
    "run_eagerly",
    "odd parts",
    "large blocks",
]
