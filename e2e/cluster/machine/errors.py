"""The error of this package."""


class ClusterError(Exception):
    """The cluster, one of its programs or an image is not available. The message has the reason and what to do."""
