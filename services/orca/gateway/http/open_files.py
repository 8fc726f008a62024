"""How many files the process may have open: each connection is one."""

import logging
import resource

log = logging.getLogger(__name__)

OTHER_FILES = 128
"""Beside the clients': connections to the pool (its setting, 32), refused ones (64), listening sockets, libraries."""


def allow_open_files(connections_max: int) -> None:
    """Raise the process's soft limit to its hard one if `connections_max` needs it, and say so; or that it is too low.

    The soft limit is 1,024 nearly everywhere, for programs that use select; nothing here does.
    """
    needed = connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _holds(soft, needed):
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.info("limit of open files raised for connections_max", extra={"before": soft, "after": hard})
    if not _holds(hard, needed):
        log.warning(
            "the process may open %d files, connections_max %d needs %d: raise the limit or lower it",
            hard,
            connections_max,
            needed,
        )


def _holds(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
