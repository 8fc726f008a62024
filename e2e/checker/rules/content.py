"""Rules about the tokens of one accepted call: they must match usage, text, the pool's log and the oracle. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema_rs

from checker.history.answers import WHOLE, Call, Choice, ParsedEvent, max_tokens_of
from checker.rules.evidence import Evidence, Harm, Violation, violation_in
from checker.rules.stream import CallRule

EvidenceRule = Callable[[Call, Evidence], Iterator[Violation]]

OWN_REASONS = ("stop", "length")


def reason_fits(call: Call) -> Iterator[Violation]:
    """Check the finish reason: `length` means max_tokens tokens, `stop` at most as many, a stop was requested."""
    limit = max_tokens_of(call.body)
    for choice in call.choices():
        end = choice.end
        if end is None or end.error is not None:
            continue
        count = _count(choice)
        if end.finish_reason not in OWN_REASONS:
            yield _misstated("reason_fits", call, choice, "stop or length", f"{end.finish_reason}", end)
        if count is not None and limit is not None:
            if end.finish_reason == "length" and count != limit:
                harm = Harm.SKIPPED if count < limit else Harm.REPEATED
                found, difference = f"length after {count}", abs(limit - count)
                wanted = f"{limit} tokens"
                yield violation_in("reason_fits", harm, call, choice, wanted, found, count=difference, at=end)
            if end.finish_reason == "stop" and count > limit:
                yield _misstated("reason_fits", call, choice, f"at most {limit} tokens", f"{count}", end)
        if end.stop_reason is not None and end.stop_reason not in _asked_stops(call.body):
            yield _misstated("reason_fits", call, choice, "a stop that was requested", f"{end.stop_reason!r}", end)


def usage_fits(call: Call) -> Iterator[Violation]:
    """Check that usage comes if requested, once before `[DONE]`, and counts the sent tokens."""
    choices = call.choices()
    running = [event for event in call.events if event.usage is not None and event.index is not None]
    for event in running:
        wanted = (event.index or 0) + 1
        found = event.usage["completion_tokens"] if event.usage else None
        if found != wanted:
            yield _misstated(
                "usage_fits", call, Choice(event.choice or 0), f"{wanted} tokens so far", f"{found}", event
            )
    totals = [event for event in call.events if event.usage is not None and event.choice is None]
    for connection in call.connections.values():
        told_here = [event for event in totals if event.record.connection == connection.number]
        is_done = any(event.is_done for event in connection.events)
        if len(told_here) > _asks_usage(call.body) or (is_done and len(told_here) < _asks_usage(call.body)):
            usages = f"{_asks_usage(call.body):d} usage before [DONE]"
            yield _misstated("usage_fits", call, None, usages, f"{len(told_here)}", connection.events[-1])
    counts = [_count(choice) for choice in choices]
    if None in counts:
        return
    completion = sum(count for count in counts if count is not None)
    for event in totals:
        assert event.usage is not None
        prompt = _prompt_tokens(call.body)
        told = event.usage["prompt_tokens"], event.usage["completion_tokens"], event.usage["total_tokens"]
        wanted_usage = (told[0] if prompt is None else prompt, completion)
        if told != (*wanted_usage, sum(wanted_usage)):
            yield _misstated("usage_fits", call, None, f"usage of {wanted_usage}", f"{told}", event)


def text_is_join(call: Call, evidence: Evidence) -> Iterator[Violation]:
    """Check that the text of a choice is that of its tokens, cut at the stop string that ended it."""
    if evidence.decode is None:
        return
    for choice in call.choices():
        log = evidence.logs.get(f"{call.request_id}.{choice.number}")
        # If the call did not request ids, the log has them.
        ids, end = choice.token_ids or (log.tokens if log else None), choice.end
        if not ids or end is None or end.error is not None or call.body.get("echo"):
            continue
        if isinstance(end.stop_reason, int):
            ids = ids[:-1]  # a token that ends the output has no text
        text = evidence.decode(ids)
        if isinstance(end.stop_reason, str):
            text = text.partition(end.stop_reason)[0]
        if text != choice.text:
            yield _misstated("text_is_join", call, choice, repr(text), repr(choice.text), end)


def equals_log(call: Call, evidence: Evidence) -> Iterator[Violation]:
    """Check that the call received the tokens of the pool's log, and that the log itself is complete."""
    if not evidence.logs:
        return
    for choice in call.choices():
        name = f"{call.request_id}.{choice.number}"
        log = evidence.logs.get(name)
        if log is None:
            yield violation_in("equals_log", Harm.LOST, call, choice, f"a log of {name}", "none", at=choice.end)
            continue
        if log.reason is None or not log.is_dense or log.count != len(log.tokens):
            found = f"reason {log.reason}, count {log.count}, {len(log.tokens)} tokens, dense: {log.is_dense}"
            yield violation_in("equals_log", Harm.LOST, call, choice, "a dense log with its end", found, at=choice.end)
        yield from _compare("equals_log", Harm.REVISED, call, choice, log.tokens, log.reason)


def equals_oracle(call: Call, evidence: Evidence) -> Iterator[Violation]:
    """Check that the call received the tokens that the oracle computed from the prompt."""
    for choice in call.choices():
        expected = evidence.expected.get((call.name, choice.number))
        if expected is not None:
            yield from _compare("equals_oracle", Harm.WRONG, call, choice, expected.tokens, expected.finish_reason)


def matches_grammar(call: Call) -> Iterator[Violation]:
    """Check that a whole answer matches what its call asked for; one that was cut has no whole text."""
    matches = _matcher_of(call.body)
    if matches is None:
        return
    for choice in call.choices():
        end = choice.end
        if end is None or end.error is not None or end.finish_reason != "stop" or end.stop_reason is not None:
            continue
        if not matches(choice.text):
            yield _misstated("matches_grammar", call, choice, "an answer of the grammar", repr(choice.text), end)


CONTENT_RULES: tuple[CallRule, ...] = (reason_fits, usage_fits, matches_grammar)
EVIDENCE_RULES: tuple[EvidenceRule, ...] = (text_is_join, equals_log, equals_oracle)


def _compare(
    rule: str, harm: Harm, call: Call, choice: Choice, tokens: Sequence[int], reason: str | None
) -> Iterator[Violation]:
    """Find the first difference between the received and the right tokens; a choice without an end may have fewer."""
    end = choice.end
    for index, event in sorted(choice.tokens.items()):
        if event.token_ids is not None and event.token_ids != tuple(tokens[index : index + 1]):
            wanted = f"token {index} is {tokens[index]}" if index < len(tokens) else f"{len(tokens)} tokens"
            yield violation_in(rule, harm, call, choice, wanted, f"{event.token_ids}", at=event)
            return
    if end is None or end.error is not None:
        return
    count = _count(choice)
    if count is not None and count != len(tokens):
        found, missing = f"an end after {count}", abs(len(tokens) - count)
        harm = Harm.SKIPPED if count < len(tokens) else Harm.REPEATED
        yield violation_in(rule, harm, call, choice, f"{len(tokens)} tokens", found, count=missing, at=end)
    if reason is not None and end.finish_reason != reason:
        yield _misstated(rule, call, choice, f"end by {reason}", f"by {end.finish_reason}", end)


def _matcher_of(body: dict[str, Any]) -> Callable[[str], bool] | None:
    """Return what tells whether an answer matches the call's grammar; None if it has none."""
    structured, wanted = body.get("structured_outputs") or {}, body.get("response_format") or {}
    if "regex" in structured:
        return lambda text: re.fullmatch(structured["regex"], text) is not None
    if "choice" in structured:
        return lambda text: text in structured["choice"]
    if "json_schema" in wanted:
        return lambda text: _is_valid_json(text, wanted["json_schema"]["schema"])
    return None


def _is_valid_json(text: str, schema: dict[str, Any]) -> bool:
    """Return whether a text is JSON that a schema allows."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return jsonschema_rs.is_valid(schema, document)


def _count(choice: Choice) -> int | None:
    """Return the number of received tokens; None for a whole answer without ids."""
    is_uncounted = choice.end is not None and choice.end.record.id == WHOLE and not choice.tokens
    return None if is_uncounted else len(choice.tokens)


def _asked_stops(body: dict[str, Any]) -> list[str | int]:
    stop = body.get("stop") or []
    return ([stop] if isinstance(stop, str) else list(stop)) + list(body.get("stop_token_ids") or [])


def _asks_usage(body: dict[str, Any]) -> bool:
    return not body.get("stream") or bool((body.get("stream_options") or {}).get("include_usage"))


def _prompt_tokens(body: dict[str, Any]) -> int | None:
    """Return the length of a prompt of token ids, with those of the call's `decoder_prefix`; None for a text.

    Planned prefixes do not begin with the model's start token, which would not be counted.
    """
    prompt, prefix = body.get("prompt"), body.get("decoder_prefix") or []
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], int) and isinstance(prefix, list)):
        return None
    return len(prompt) + len(prefix)


def _misstated(rule: str, call: Call, choice: Choice | None, expected: str, found: str, at: ParsedEvent) -> Violation:
    return violation_in(rule, Harm.MISSTATED, call, choice, expected, found, at=at)
