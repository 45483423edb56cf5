"""What Keras' callbacks lack across workers."""

from keras_mirror.callbacks.backup import beginning_epoch as beginning_epoch
from keras_mirror.callbacks.backup import counting as counting
from keras_mirror.callbacks.backup import restoring as restoring
from keras_mirror.callbacks.backup import save_before_leaving as save_before_leaving
from keras_mirror.callbacks.backup import saving as saving
from keras_mirror.callbacks.calls import (
    agreeing_at_epoch_begin as agreeing_at_epoch_begin,
)
from keras_mirror.callbacks.calls import (
    agreeing_at_epoch_end as agreeing_at_epoch_end,
)
from keras_mirror.callbacks.calls import agreeing_from_start as agreeing_from_start
from keras_mirror.callbacks.calls import heard_or_spared as heard_or_spared
from keras_mirror.callbacks.chief import chief_only as chief_only
from keras_mirror.callbacks.chief import for_this_worker as for_this_worker
from keras_mirror.callbacks.consistency import ConsistencyCheck as ConsistencyCheck
from keras_mirror.callbacks.consistency import check_consistency as check_consistency
from keras_mirror.callbacks.orbax import (
    as_numpy_for_many_workers as as_numpy_for_many_workers,
)
from keras_mirror.callbacks.orbax import loading_as_numpy as loading_as_numpy
from keras_mirror.callbacks.sharded import ShardedCheckpoint as ShardedCheckpoint
