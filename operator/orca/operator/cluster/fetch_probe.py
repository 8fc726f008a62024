"""Asks the running fetch of a deployment how far it is, on its internal port: that takes no rights in the cluster."""

from collections.abc import Iterable
from http.client import HTTPConnection, HTTPException

from orca.core.fetch_report import PROGRESS_PAGE, FetchProgress, read_progress
from orca.operator.domain.observed import is_going
from orca.operator.domain.resource import Json
from orca.operator.render.fetch import PORT

ANSWER_S = 2.0


def look(pods: Iterable[Json], port: int = PORT) -> FetchProgress | None:
    """Args: pods: of fetches. Returns: the figures of the one that runs; None when none does, or it does not answer."""
    for pod in pods:
        status = pod.get("status", {})
        if status.get("phase") == "Running" and status.get("podIP") and not is_going(pod):
            return _ask(status["podIP"], port)
    return None


def _ask(host: str, port: int) -> FetchProgress | None:
    connection = HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", PROGRESS_PAGE)
        return read_progress(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
