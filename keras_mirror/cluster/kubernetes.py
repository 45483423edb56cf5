"""Kubernetes' indexed jobs and JobSets; JAX asks the cluster."""

from keras_mirror.cluster.resolver import Scheduler


class Kubernetes(Scheduler):
    """A pod of an indexed job."""

    order = 4
    name = "Kubernetes"
    variables = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
