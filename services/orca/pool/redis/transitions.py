"""The text of each transition: a Lua script with the constants and functions that all of them share."""

import hashlib
from functools import cache
from pathlib import Path

from orca.pool import latency_bins, length_bins, poison
from orca.pool.order import order_class, order_rules, order_stats
from orca.pool.redis import script_format
from orca.pool.redis.keys import lua_key_builders
from orca.pool.schemas import Schemas

_SCRIPTS = Path(__file__).with_name("scripts")
_SHARED = ("waiting_index", "prelude")  # texts before every transition
_PARTS = {"claim": ("order",)}  # further texts of a transition
# After a transition's text: its answer, and the run of Redis that may still hold back what it wrote (durability.py).
_ANSWER = "return { transition() or false, unwritten_run() }"


class Transition:
    """A transition's text, and its hash for EVALSHA."""

    def __init__(self, name: str, schemas: Schemas) -> None:
        parts = (*_SHARED, *_PARTS.get(name, ()), name)
        *shared, transition = ((_SCRIPTS / f"{part}.lua").read_text() for part in parts)
        rules = [
            schemas.lua(),
            poison.lua(),
            length_bins.lua(),
            latency_bins.lua(),
            order_class.lua(),
            order_rules.lua(),
            order_stats.lua(),
        ]
        texts = [lua_key_builders(), *rules, script_format.submit_tables(), *shared]
        self.text = "".join([*texts, f"local function transition()\n{transition}\nend\n", _ANSWER])
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


@cache
def all_transitions(schemas: Schemas) -> dict[str, Transition]:
    """Return all transitions of a release that writes these schema numbers, by name."""
    names = sorted(path.stem for path in _SCRIPTS.glob("*.lua"))
    parts = {*_SHARED, *(part for texts in _PARTS.values() for part in texts)}
    return {name: Transition(name, schemas) for name in names if name not in parts}
