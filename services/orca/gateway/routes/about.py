"""Tells about the gateway and its model: models, tokens, readiness and metrics."""

import asyncio
from typing import Any

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.accept import chat_prompt, chat_tools
from orca.gateway.calls.bodies import DetokenizeBody, TokenizeBody
from orca.gateway.calls.token_ids import check_token_ids
from orca.gateway.errors import ApiError
from orca.gateway.gateway import Gateway
from orca.gateway.http.receive import UnreadBody, receive_body

STATS_SECONDS = 1.0  # a probe is answered in this time, with or without the pool's counts


async def ready(gateway: Gateway) -> Response:
    """Answer 200 once a first call would be served: a group has formed at least once for a model of this gateway.

    From then on the answer stays 200, whatever the pool and the groups do. The gateway accepts calls as long as the
    pool can store them, answers 503 itself otherwise, and must stay in its Service. Only a gateway that drains answers
    503 again.

    The body reports pool and groups: `groups_formed` are those that serve now, `groups` those whose scheduler lives.
    `max_total_tokens` is the longest request that fits, prompt and output in any split; null before a group has formed.
    The page at `/` learns here what the model can do.
    """
    stats = await gateway.overload.backlog.counts(STATS_SECONDS)
    current = gateway.models.current
    promised = gateway.models.promised(current)
    is_ready = gateway.models.has_formed and not gateway.drain.has_begun
    answer = {
        "ready": is_ready,
        "draining": gateway.drain.has_begun,
        "model": current.info.name,
        "revision": current.info.revision,
        "pool": "away" if stats is None else "ok",
        "groups": [] if stats is None else list(stats.groups),
        "groups_formed": [] if stats is None else list(stats.groups_formed),
        "max_total_tokens": None if promised is None else promised.longest(current.info),
        "is_encoder_decoder": current.info.encoder_decoder is not None,
        "has_chat_template": current.chat_template is not None,
        "waiting": None if stats is None else stats.queued,
        "running": None if stats is None else stats.owned,
    }
    return Response(orjson.dumps(answer), 200 if is_ready else 503, media_type="application/json")


async def metrics(gateway: Gateway, *, is_metrics_port: bool) -> Response:
    """Answer a scraper.

    Args: is_metrics_port: the call came in by the separate port for metrics.
    Raises: ApiError 404 on the API's port if metrics have a separate one.
    """
    if gateway.settings.metrics_port is not None and not is_metrics_port:
        raise ApiError(404, "metrics are on another port of this gateway", code="not_found")
    gateway.metrics.key_file_broken.set(gateway.keys.is_file_broken)
    gateway.metrics.set_pool(await gateway.overload.backlog.counts(STATS_SECONDS))
    gateway.metrics.asyncio_tasks.set(len(asyncio.all_tasks()))
    return Response(gateway.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


def models(gateway: Gateway) -> dict[str, Any]:
    """List the current model."""
    return {"object": "list", "data": [_model(gateway)]}


def model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Describe the current model. Raises: ApiError 404 for an unknown name."""
    if not name:
        raise ApiError(404, "no model is named: GET /v1/models lists the model of this server", code="not_found")
    gateway.models.check_name(name)
    return _model(gateway)


def _model(gateway: Gateway) -> dict[str, Any]:
    """Describe the current model, whatever known name the client used."""
    current = gateway.models.current
    info, kind = current.info, current.info.encoder_decoder
    return {
        "id": info.name,
        "object": "model",
        "created": current.created,
        "owned_by": "orca",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
        "is_encoder_decoder": kind is not None,
        "tool_format": current.formats.tool_name,
        "reasoning_format": current.formats.reasoning_name,
        "max_source_len": None if kind is None else kind.source_positions,
        "max_target_len": None if kind is None else kind.target_positions,
        "revision": info.revision,
    }


async def tokenize(gateway: Gateway, unread: UnreadBody) -> dict[str, Any]:
    """Encode a prompt or a chat as a call would. Raises: ApiError, InvalidRequest."""
    with gateway.body_budget.for_call() as budget:
        body = await receive_body(unread, TokenizeBody, gateway.settings, budget)
    gateway.models.check_name(body.model)
    current = gateway.models.current
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    is_chat = body.prompt is None
    if body.prompt is None:
        text = await chat_prompt(body, current, gateway.settings, chat_tools(body, current))
    else:
        text = body.prompt
    add_special_tokens = not is_chat if body.add_special_tokens is None else body.add_special_tokens
    param = "messages" if is_chat else "prompt"
    tokens = await current.encoder.encode_text(text, param=param, add_special_tokens=add_special_tokens)
    answer = {"count": len(tokens), "max_model_len": current.info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [current.tokenizer.token_text(token_id) for token_id in tokens]
    return answer


async def detokenize(gateway: Gateway, unread: UnreadBody) -> dict[str, Any]:
    """Decode tokens to text, with special tokens written out. Raises: ApiError, InvalidRequest."""
    with gateway.body_budget.for_call() as budget:
        body = await receive_body(unread, DetokenizeBody, gateway.settings, budget)
    gateway.models.check_name(body.model)
    current = gateway.models.current
    tokens_max = max(current.info.max_model_len, gateway.settings.detokenize_tokens_max)
    if len(body.tokens) > tokens_max:
        raise InvalidRequest(f"tokens: has {len(body.tokens)} token ids, more than {tokens_max}", param="tokens")
    check_token_ids(body.tokens, current.info.vocab_size, param="tokens")
    return {"prompt": current.tokenizer.decode(body.tokens, skip_special_tokens=False)}
