"""What of its data a worker reads, form by form."""

from keras_mirror.worker_data.own_part import own_part as own_part
from keras_mirror.worker_data.read_ahead import (
    stop_in_one_place as stop_in_one_place,
)
from keras_mirror.worker_data.read_ahead import (
    stopping_in_one_place as stopping_in_one_place,
)
from keras_mirror.worker_data.tf_files import like_a_batch as like_a_batch
from keras_mirror.worker_data.tf_files import (
    naming_missing_files as naming_missing_files,
)
