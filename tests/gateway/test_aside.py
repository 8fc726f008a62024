"""Whole answers are rendered while the loop goes on, whether they have many choices or long ones."""

import orjson
import pytest
from gateway_rig import eos, ids, make_request, tokenizer, turns_during

from orca.core.request import End, FinishReason, Request, Token
from orca.gateway.aside import INLINE_TOKENS, write_answer, write_text
from orca.gateway.render import Kind, Reading, Rendering, text_so_far

READING = Reading(tokenizer(), frozenset({eos()}))
RENDERING = Rendering(kind=Kind.COMPLETION, model="tiny", created=1)


def choices(count: int, tokens: int) -> tuple[list[Request], list[tuple[list[Token], End]]]:
    log = [Token(one) for one in (ids("the fox jumps over the dog ") * tokens)[:tokens]]
    requests = [make_request(choice=choice) for choice in range(count)]
    return requests, [(log, End(FinishReason.LENGTH, tokens))] * count


@pytest.mark.parametrize(("count", "tokens"), [(50, 3), (2, 50 * INLINE_TOKENS)])
async def test_others_have_their_turn_while_an_answer_is_rendered(count: int, tokens: int) -> None:
    requests, logs = choices(count, tokens)
    assert await turns_during(write_answer(requests, RENDERING, logs, READING)) >= 20


async def test_a_long_text_is_what_it_is_beside_the_loop_or_in_it() -> None:
    [request], [(tokens, end)] = choices(1, 2 * INLINE_TOKENS)
    beside = await write_text(request, RENDERING, tokens, end, READING)
    assert beside == text_so_far(request, RENDERING, tokens, end, READING)


async def test_a_whole_answer_has_its_choices_in_their_order() -> None:
    requests, logs = choices(3, 2)
    logs[1] = choices(1, 2 * INLINE_TOKENS)[1][0]
    answer = orjson.loads(await write_answer(requests, RENDERING, logs, READING))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(answer["choices"][1]["text"]) > len(answer["choices"][2]["text"])
