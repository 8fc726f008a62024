"""What can go wrong, said in a sentence to whoever called."""


class ClusterError(Exception):
    """The cluster, a program of it or an image cannot be had. The message says why, and what would help."""
