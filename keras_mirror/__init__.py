"""keras_mirror: tf.distribute's strategies for Keras 3.

```python
import keras_mirror as km

model.compile(optimizer="adam", loss="mse", distribution="mirrored")
```
"""

from keras_mirror._startup import is_command_line as _is_command_line
from keras_mirror._version import __version__ as __version__

# The command line answers --help, and starts workers, without any framework.
if not _is_command_line():
    from keras_mirror import _plugin as _plugin
    from keras_mirror import errors as errors
    from keras_mirror._context import ReplicaContext as ReplicaContext
    from keras_mirror._context import replica_context as replica_context
    from keras_mirror.callbacks import ConsistencyCheck as ConsistencyCheck
    from keras_mirror.callbacks import ShardedCheckpoint as ShardedCheckpoint
    from keras_mirror.callbacks import check_consistency as check_consistency
    from keras_mirror.cluster import ClusterSpec as ClusterSpec
    from keras_mirror.launch.failure import record_uncaught as _record_uncaught
    from keras_mirror.launch.function import launch as launch
    from keras_mirror.optimizer import DistributedOptimizer as DistributedOptimizer
    from keras_mirror.strategies import CentralStorageStrategy as CentralStorageStrategy
    from keras_mirror.strategies import MirroredStrategy as MirroredStrategy
    from keras_mirror.strategies import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from keras_mirror.strategies import OneDeviceStrategy as OneDeviceStrategy
    from keras_mirror.strategies import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from keras_mirror.strategies import Strategy as Strategy
    from keras_mirror.strategies import get_strategy as get_strategy
    from keras_mirror.strategies import set_strategy as set_strategy

    _plugin.install()
    _record_uncaught()
