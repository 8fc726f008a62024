"""Calls to the API server: one HTTP request each, with a bound on its time and the server's own words on failure.

Calls block. Code on an event loop makes them in a thread.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from orca.operator.domain.resource import Json

CALL_S = 20.0
"""Bound on one call."""


def no_bound() -> float:
    """Return the seconds that a write may take if only CALL_S bounds it."""
    return math.inf


class ApiServerError(Exception):
    """The API server did not do what it was asked. The message is its own."""

    def __init__(self, status: int, message: str) -> None:
        """Args: status: of HTTP; 0 if there was no answer."""
        super().__init__(message)
        self.status = status

    @property
    def is_answer(self) -> bool:
        """True if the API server answered, and refused this one call."""
        return self.status != 0

    @property
    def is_refusal(self) -> bool:
        """True if the next try would be refused too: for a right, a quota or an admission, not for load or a fault."""
        return 400 <= self.status < 500 and self.status != 429


class ApiCalls:
    """Raises: ApiServerError, from every method."""

    def __init__(
        self, api: client.ApiClient, *, call_s: float = CALL_S, write_s: Callable[[], float] = no_bound
    ) -> None:
        """
        Args:
            api: without retries of its own, which would go on after a bound.
            call_s: bound on one call.
            write_s: called before each write: seconds that it may take; 0 if it must not be sent.
        """
        self._api = api
        self._call_s = call_s
        self._write_s = write_s

    @property
    def write_s(self) -> float:
        """Seconds that a write which begins now may take, here or elsewhere on behalf of a resource; 0 for none."""
        return min(self._call_s, self._write_s())

    def get(self, path: str) -> Json | None:
        """Return an object; None if there is none."""
        try:
            found: Json = self.call("GET", path)
        except ApiServerError as error:
            if error.status == 404:
                return None
            raise
        return found

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> Any:
        """Make one call. PATCH is a server-side apply. Returns: the JSON of the answer."""
        bound_s = self._call_s if method == "GET" else self.write_s
        if bound_s <= 0:
            raise ApiServerError(0, f"{method} {path}: not sent, since this operator does not hold the Lease")
        is_apply = method == "PATCH"
        content_type = "application/apply-patch+yaml" if is_apply else "application/json"
        params = self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            # JSON is YAML too. The client library encodes a body only if its content type is JSON.
            body=json.dumps(body) if is_apply else body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*params, _request_timeout=bound_s)
            content: bytes = response.read()  # type: ignore[no-untyped-call, unused-ignore]
        except (ApiException, HTTPError, OSError) as error:
            raise ApiServerError(getattr(error, "status", None) or 0, f"{method} {path}: {error}") from error
        if not 200 <= response.status <= 299:
            raise ApiServerError(response.status, f"{method} {path}: {_message(content, response.reason)}")
        return json.loads(content)


def _message(content: bytes, reason: str) -> str:
    try:
        return str(json.loads(content)["message"])
    except (TypeError, ValueError, KeyError):
        return reason
