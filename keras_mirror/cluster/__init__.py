"""Who am I: the processes that train together, and which of them this one is."""

from keras_mirror.cluster.resolver import find as find
from keras_mirror.cluster.spec import ClusterSpec as ClusterSpec
from keras_mirror.cluster.spec import Membership as Membership
