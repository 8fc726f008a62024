"""The text of each transition: a Lua script with the constants and functions that all of them share."""

import hashlib
from functools import cache
from pathlib import Path

from orca.pool import latency_bins, length_bins, poison
from orca.pool.redis import script_format
from orca.pool.redis.keys import lua_key_builders
from orca.pool.schemas import Schemas

_SCRIPTS = Path(__file__).with_name("scripts")
# After a transition's text: its answer, and the run of Redis that may still hold back what it wrote (durability.py).
_ANSWER = "return { transition() or false, unwritten_run() }"


class Transition:
    """A transition's text, and its hash for EVALSHA."""

    def __init__(self, name: str, schemas: Schemas) -> None:
        prelude, transition = ((_SCRIPTS / f"{part}.lua").read_text() for part in ("prelude", name))
        rules = [schemas.lua(), poison.lua(), length_bins.lua(), latency_bins.lua()]
        texts = [lua_key_builders(), *rules, script_format.submit_tables(), prelude]
        self.text = "".join([*texts, f"local function transition()\n{transition}\nend\n", _ANSWER])
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


@cache
def all_transitions(schemas: Schemas) -> dict[str, Transition]:
    """Return all transitions of a release that writes these schema numbers, by name."""
    names = sorted(path.stem for path in _SCRIPTS.glob("*.lua"))
    return {name: Transition(name, schemas) for name in names if name != "prelude"}
