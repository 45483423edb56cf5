"""What Keras' callbacks lack across workers."""

from keras_mirror.callbacks.chief import chief_only as chief_only
from keras_mirror.callbacks.chief import for_this_worker as for_this_worker
from keras_mirror.callbacks.consistency import ConsistencyCheck as ConsistencyCheck
from keras_mirror.callbacks.consistency import check_consistency as check_consistency
