"""Models, tokens, metrics, the OpenAPI document, spans and settings."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from orca.core.domain.errors import SettingError
from orca.gateway.answer.tracing import Tracing
from orca.gateway.settings import GatewaySettings, parse_settings
from orca.pool.settings import PoolSettings
from support.gateway.gateway_rig import MODEL, WORDS, error_of, ids, rig, until


async def test_models_are_listed_and_found_by_name() -> None:
    async with rig(schedules=False) as one:
        listed = (await one.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        assert (await one.client.get("/v1/models/tiny")).json() == listed["data"][0]
        assert listed["data"][0]["max_model_len"] == MODEL.max_model_len
        status, error = error_of(await one.client.get("/v1/models/"))
        assert (status, error["message"]) == (404, "no model is named: GET /v1/models lists the model of this server")
        status, error = error_of(await one.client.get("/v1/models/org/other"))
        assert (status, error["code"]) == (404, "model_not_found")


async def test_text_is_tokenized_and_detokenized() -> None:
    async with rig(schedules=False) as one:
        tokens = (await one.post("/tokenize", prompt="the fox<|end|>", return_token_strs=True)).json()
        assert tokens["tokens"] == list(ids("the fox<|end|>"))
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert tokens["max_model_len"] == MODEL.max_model_len
        text = (await one.post("/detokenize", tokens=tokens["tokens"])).json()
        assert text == {"prompt": "the fox<|end|>"}


async def test_messages_are_tokenized_as_a_chat_would_be() -> None:
    async with rig() as one:
        messages = [{"role": "user", "content": "hi"}]
        found = (await one.post("/tokenize", messages=messages)).json()
        answer = await one.chat(messages=messages, return_token_ids=True)
        assert found["tokens"] == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
async def test_bad_tokenizer_calls_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    async with rig(schedules=False) as one:
        status, error = await one.error(path, **body)
        assert (status, error["param"]) == (400, param)


async def test_metrics_count_calls_and_tokens() -> None:
    async with rig() as one:
        await one.complete()
        await one.complete(n=2, stop="wör")
        await one.post("/v1/completions", prompt="a", temperature=9)
        await one.client.get("/nowhere")
        await until(lambda: one.app.state.gateway.metrics.open_connections._value.get() == 0)
        families = text_string_to_metric_families((await one.client.get("/metrics")).text)
        values = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }
        tokens, prompt = len(ids(WORDS)), len(ids("the fox"))
        assert values["orca_request_success_total", "length", "tiny"] == 1
        assert values["orca_request_success_total", "stop", "tiny"] == 2
        assert values["orca_time_to_first_token_seconds_count", "tiny"] == 2
        assert values["orca_e2e_request_latency_seconds_count", "tiny"] == 2
        assert values["orca_inter_token_latency_seconds_count", "tiny"] >= tokens - 1
        assert values["orca_request_prompt_tokens_sum", "tiny"] == 3 * prompt
        assert values["orca_prompt_tokens_total", "tiny"] == 3 * prompt
        assert values["orca_generation_tokens_total", "tiny"] == values["orca_request_generation_tokens_sum", "tiny"]
        assert values["orca_http_requests_total", "/v1/completions", "200", "POST"] == 2
        assert values["orca_http_requests_total", "/v1/completions", "400", "POST"] == 1
        assert values["orca_http_requests_total", "404", "GET", "other"] == 1
        assert values["orca_asyncio_tasks",] >= 1
        assert values["orca_pool_up",] == 1
        assert values["orca_pool_groups",] == 1
        assert values["orca_pool_groups_formed",] == 1
        assert values["orca_pool_requests_waiting",] == 0
        assert values["orca_pool_requests_waiting_max",] == 1000
        assert values["orca_pool_reserved_bytes_max",] > values["orca_pool_reserved_bytes",]


async def test_the_openapi_document_describes_the_bodies() -> None:
    async with rig(schedules=False) as one:
        document = (await one.client.get("/openapi.json")).json()
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/ChatBody"}
        schemas = document["components"]["schemas"]
        assert schemas["ChatBody"]["required"] == ["messages"]
        assert schemas["CompletionBody"]["properties"]["prompt"]["anyOf"][0] == {"type": "string"}
        references = set(re.findall(r'"#/components/schemas/(\w+)"', (await one.client.get("/openapi.json")).text))
        assert references <= set(schemas)


async def test_spans_show_the_phases_of_a_call_under_the_callers_span() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    async with rig(tracing=tracing) as one:
        context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"prompt": "the fox", "max_tokens": 50}
        await one.client.post("/v1/completions", json=body, headers={"traceparent": context})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode", "deliver"}
    call = spans["POST /v1/completions"]
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == "b7ad6b7169203331"
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"0af7651916cd43dd8448eb211c80319c"}
    assert call.attributes is not None
    assert call.attributes["gen_ai.usage.output_tokens"] == len(ids(WORDS))


@pytest.mark.parametrize(
    ("body", "status", "outcome"),
    [
        ({"prompt": "a", "background": True}, 202, StatusCode.UNSET),
        ({"prompt": ["a", "b"]}, 429, StatusCode.ERROR),
    ],
)
async def test_a_call_that_is_not_answered_with_tokens_has_a_span_too(
    body: dict[str, Any], status: int, outcome: StatusCode
) -> None:
    exporter = InMemorySpanExporter()
    async with rig(tracing=Tracing(exporter), schedules=False, pool_settings=PoolSettings(max_queued=1)) as one:
        assert (await one.client.post("/v1/completions", json=body)).status_code == status
    [call] = [span for span in exporter.get_finished_spans() if span.name == "POST /v1/completions"]
    assert call.status.status_code == outcome


async def test_a_client_that_leaves_ends_the_span_of_its_call() -> None:
    exporter = InMemorySpanExporter()
    async with rig(tracing=Tracing(exporter), schedules=False) as one:
        call = asyncio.create_task(one.post("/v1/completions", prompt="a"))
        await until(lambda: len(one.pool.state.parents) == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    [span] = [span for span in exporter.get_finished_spans() if span.name == "POST /v1/completions"]
    assert span.attributes is not None
    assert span.attributes["orca.choices_unseen"] == 1


def test_settings_come_from_flags_over_variables_over_defaults() -> None:
    environment = {"ORCA_GATEWAY_PORT": "81", "ORCA_GATEWAY_HOST": "h", "ORCA_GATEWAY_API_KEYS": "a, b", "PATH": "/"}
    settings = parse_settings(["--model", "m", "--port", "82", "--drain-seconds", "1.5"], environment)
    assert (settings.model, settings.port, settings.host, settings.drain_seconds) == ("m", 82, "h", 1.5)
    assert settings.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "environment", "name"),
    [
        ([], {}, "model"),
        (["--model", "m", "--port", "x"], {}, "port"),
        (["--model", "m", "--port", "-1"], {}, "port"),
        (["--model", "m", "--wrong", "1"], {}, "wrong"),
        (["--model", "m", "--mod", "1"], {}, "mod"),
        (["--model", "m"], {"ORCA_GATEWAY_WRONG": "1"}, "ORCA_GATEWAY_WRONG"),
        (["--model", "m", "--log-level", "loud"], {}, "--log-level"),
        (["--model", "m", "--dtype", "int8"], {}, "dtype"),
        (["--model", "m", "--drain-seconds", "-1"], {}, "--drain-seconds"),
    ],
)
def test_a_bad_setting_stops_the_start_with_its_name(argv: list[str], environment: dict[str, str], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        parse_settings(argv, environment)


def test_keys_are_not_shown_with_the_settings() -> None:
    assert "secret" not in repr(GatewaySettings(model="tiny", api_keys=("secret",)))


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny"])
async def test_a_head_request_is_answered_as_get_without_a_body(path: str) -> None:
    async with rig() as one:
        head, get = await one.client.head(path), await one.client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert f'method="HEAD",route="{path.replace("tiny", "{name:path}")}"' in (await one.client.get("/metrics")).text


async def test_a_models_creation_time_is_that_of_its_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    os.utime(config, (1_700_000_000, 1_700_000_000))
    async with rig(schedules=False, model=replace(MODEL, folder=tmp_path)) as one:
        assert (await one.client.get("/v1/models")).json()["data"][0]["created"] == 1_700_000_000
