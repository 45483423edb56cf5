"""What a user picks: one class a file, no backend in sight."""

from keras_mirror.strategies.base import Strategy as Strategy
from keras_mirror.strategies.central_storage import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from keras_mirror.strategies.current import for_compile as for_compile
from keras_mirror.strategies.current import get_strategy as get_strategy
from keras_mirror.strategies.current import get_strategy_class as get_strategy_class
from keras_mirror.strategies.current import governing as governing
from keras_mirror.strategies.current import set_strategy as set_strategy
from keras_mirror.strategies.current import strategy_names as strategy_names
from keras_mirror.strategies.mirrored import MirroredStrategy as MirroredStrategy
from keras_mirror.strategies.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_mirror.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from keras_mirror.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
