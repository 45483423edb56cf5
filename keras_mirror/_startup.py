"""Whether this process is the `keras-mirror` command itself."""

import os
import sys

COMMAND = "keras-mirror"


def is_command_line() -> bool:
    """True in the process of `keras-mirror ...` or `python -m keras_mirror ...`."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name.removesuffix(".exe") == COMMAND:
        return True
    words = sys.orig_argv
    return any(
        flag == "-m" and module == "keras_mirror"
        for flag, module in zip(words, words[1:], strict=False)
    )
