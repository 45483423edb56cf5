"""Python as it is where only Keras, JAX and their needs are installed.

Keras imports what it finds: TensorFlow, to seed it, and more, for converting data. That
is two thirds of the seconds that a worker needs to start. `BARE_BUT_FOR` names what a
worker needs of it, separated by commas.
"""

import os
import sys
from importlib.machinery import PathFinder

_NOT_NEEDED = {"IPython", "matplotlib", "pandas", "sklearn", "tensorflow", "torch"}

_NOT_NEEDED -= set(os.environ.get("BARE_BUT_FOR", "").split(","))


class _Finder(PathFinder):
    """Finds what is installed but these."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in _NOT_NEEDED:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
