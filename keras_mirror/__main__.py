"""`python -m keras_mirror` is the `keras-mirror` command."""

import sys

from keras_mirror.command_line import main

if __name__ == "__main__":
    sys.exit(main())
