"""The grammars of one call share the time of one grammar, however many are tried."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.bodies import ChatBody
from orca.gateway.calls.call_grammar import Chat, check_grammar
from orca.gateway.formats.tools import tools_of
from orca.gateway.grammars import checker
from orca.gateway.grammars.checker import GrammarChecker, GrammarRefusal, GrammarTime
from orca.gateway.grammars.fields import NamedGrammar
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import MODEL, tokenizer
from support.gateway.tool_rig import served, template

MOST_S = 0.8
SETTINGS = GatewaySettings(model="tiny", grammar_seconds_max=MOST_S)
WORDS = {name: f"word-of-{name}" for name in "fgh"}


class StubGrammars:
    """Grants time without using any: a grammar takes some seconds, and is refused or passes."""

    def __init__(self, verdict: Callable[[set[str]], tuple[float, str | None]]) -> None:
        """Args: verdict: seconds and refusal of a grammar, by the names of the functions whose schemas are in it."""
        self._verdict = verdict
        self.used_s = 0.0
        self.tried: list[str] = []

    def time_of_call(self) -> GrammarTime:
        return GrammarTime(build_s=MOST_S, wait_s=MOST_S)

    async def refusal(self, grammar: NamedGrammar, time: GrammarTime) -> GrammarRefusal | None:
        names = {name for name, word in WORDS.items() if word in grammar.text}
        self.tried.append("".join(sorted(names)))
        seconds, reason = self._verdict(names)
        granted_s = max(time.build_s, 0.0)
        self.used_s += min(seconds, granted_s)
        time.build_s -= min(seconds, granted_s)
        if seconds > granted_s:
            return GrammarRefusal("slow", is_slow=True)
        return None if reason is None else GrammarRefusal(reason)


async def tried_grammars(grammars: StubGrammars, strict: str = "") -> str:
    """Check the grammars of a call that has three tools. Returns: the functions whose schemas bind the answer."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "strict": name in strict,
                "parameters": {"type": "object", "properties": {"x": {"enum": [word]}}, "required": ["x"]},
            },
        }
        for name, word in WORDS.items()
    ]
    model = replace(served(template("hermes")), grammars=cast("GrammarChecker", grammars))
    body = ChatBody.model_validate({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools})
    chat = Chat(prompt=[], tools=tools_of(body.tools, "required", None), reasoning=None)
    assert await check_grammar(body, model, SETTINGS, chat) is not None
    return grammars.tried[-1]


CASES: dict[str, tuple[Callable[[set[str]], tuple[float, str | None]], list[str]]] = {
    "all pass": (lambda _: (0.1, None), ["fgh"]),
    "one is refused": (lambda names: (0.01, "bad" if "g" in names else None), ["fgh", "f", "g", "h", "fh"]),
    "together they are slow": (lambda names: (9, None) if names else (0.01, None), ["fgh", ""]),
    "the search is slow": (
        lambda names: (0.5, "bad") if len(names) > 1 else (9, None) if names else (0.01, None),
        ["fgh", "f", ""],
    ),
    "the rest is slow after the search": (
        lambda names: (0.01, "bad") if "f" in names else (9, None) if len(names) > 1 else (0.01, None),
        ["fgh", "f", "g", "h", "gh", ""],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_call_whose_schemas_are_hints_goes_on_within_the_time_of_one_grammar(case: str) -> None:
    verdict, tried = CASES[case]
    grammars = StubGrammars(verdict)
    assert await tried_grammars(grammars) == tried[-1]
    assert grammars.tried == tried
    assert grammars.used_s <= MOST_S + 1e-9


@pytest.mark.parametrize("strict", ["", "f", "fgh"])
@pytest.mark.parametrize("first_s", [0.1, 0.7, 9])
async def test_a_call_is_refused_within_the_time_of_one_grammar(first_s: float, strict: str) -> None:
    """The first grammar fails early or late, and all others are slow."""
    grammars = StubGrammars(lambda names: (first_s, "bad") if len(names) == len(WORDS) else (9, None))
    with pytest.raises(InvalidRequest, match=r"^tools: "):
        await tried_grammars(grammars, strict)
    assert grammars.used_s <= MOST_S + 1e-9
    assert grammars.tried[0] == "fgh"


async def test_a_strict_schema_alone_may_take_all_the_time() -> None:
    grammars = StubGrammars(lambda _: (MOST_S, None))
    assert await tried_grammars(grammars, "fgh") == "fgh"


async def test_a_check_takes_its_part_and_a_known_verdict_none(monkeypatch: pytest.MonkeyPatch) -> None:
    release, checked, real = threading.Event(), list[str](), checker._complaint

    def complaint(vocabulary: Any, text: str) -> str | None:
        checked.append(text)
        if "slow" in text:
            release.wait(60)
        return real(vocabulary, text)

    monkeypatch.setattr(checker, "_complaint", complaint)
    own = GrammarChecker(MODEL, tokenizer(), SETTINGS)
    known, slow, new = (NamedGrammar(f'start: "{word}"', "tools") for word in ("the", "slow", "fox"))
    try:
        time = GrammarTime(build_s=60, wait_s=60)
        assert await own.refusal(known, time) is None
        assert 0 < time.build_s < 60
        time = GrammarTime(build_s=0.01, wait_s=60)
        refusal = await own.refusal(slow, time)
        assert refusal is not None
        assert refusal.is_slow
        assert time.build_s == 0
        assert await own.refusal(known, time) is None
        refusal = await own.refusal(new, time)
        assert refusal is not None
        assert refusal.is_slow
        assert checked == [known.text, slow.text]
    finally:
        release.set()
