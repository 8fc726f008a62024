"""The OpenAPI document is true: calls that schemathesis draws from it, right and wrong, get answers that it names.

Three kinds of schemathesis's checks are left out. Some expect every right call to be accepted and every wrong one
refused. But the document cannot say how long a context is, which model is served, or which fields contradict each
other. Others are about resources that a call makes, but cancelling a request leaves its record. Those about keys and
methods are left to test_access.py, which walks the whole table.
"""

import asyncio
import contextlib
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.gateway.gateway_rig import Rig, check_refusal, rig

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
KINDS = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def made_servable(case: Any, known: list[str], is_known: bool) -> None:
    """A drawn name is hardly ever one that there is, and a deadline that passes is no fault of the server's."""
    if is_known and known and "request_id" in case.path_parameters:
        case.path_parameters["request_id"] = known[-1]
    if is_known and "name" in case.path_parameters:
        case.path_parameters["name"] = "tiny"
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str) and is_known:
            case.body["model"] = "tiny"
        if isinstance(case.body.get("deadline_ms"), int):
            case.body["deadline_ms"] += 2**30 if 0 < case.body["deadline_ms"] < 2**30 else 0


async def called(one: Rig, case: Any) -> Any:
    """The answer to a drawn call; each part as the library would send it."""
    parts = case.as_transport_kwargs(base_url="http://orca")
    content = json.dumps(parts["json"]).encode() if "json" in parts else parts.get("data")
    headers = [(name.encode(), str(value).encode("latin-1", "replace")) for name, value in parts["headers"].items()]
    return await one.client.request(
        parts["method"], parts["url"], params=parts.get("params"), headers=headers, content=content
    )


def check_operation(runner: asyncio.Runner, one: Rig, operation: Any, examples: int, known: list[str]) -> int:
    """Returns: answers that were no refusals."""
    accepted = 0

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.one_of(*(operation.as_strategy(generation_mode=kind) for kind in KINDS)), st.booleans())
    def check(case: Any, is_known: bool) -> None:
        nonlocal accepted
        made_servable(case, known, is_known)
        response = runner.run(called(one, case))
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            check_refusal(response)
        else:
            accepted += 1
            known.extend(response.headers.get_list("x-request-id"))

    check()
    return accepted


@pytest.mark.parametrize(
    "examples",
    [12, pytest.param(600, marks=pytest.mark.prove)],
    ids=["short", "long"],
)
# Drawing takes long on a machine with much else to do.
@pytest.mark.timeout(1800)
def test_calls_generated_from_the_openapi_document_get_documented_answers(examples: int) -> None:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        one = runner.run(stack.enter_async_context(rig()))
        one.scheduler.tokens_per_turn = 20
        one.scheduler.answer = lambda request: (5,) * min(request.max_new_tokens, 20)
        try:
            document = schemathesis.openapi.from_dict(one.app.openapi())
            known: list[str] = []
            operations = [found.ok() for found in document.get_all_operations()]
            # Calls that make requests come first, then those that read requests.
            operations.sort(key=lambda operation: (operation.method != "post", operation.label))
            total = 0
            for operation in operations:
                accepted = check_operation(runner, one, operation, examples, known)
                print(f"{operation.label}: {examples} calls, {accepted} accepted")
                total += accepted
            # Refusals alone would say nothing of the answers.
            assert known
            assert total > examples
        finally:
            runner.run(stack.aclose())
