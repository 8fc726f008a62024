"""Orca without one of its rules, made in memory: the checker has to find each."""

import dataclasses
from itertools import count
from typing import Any

from checker.points.patching import after_import

NEIGHBOUR_EVERY = 40
"""Every call of a rank's cache with this number returns a neighbour's slots."""

KEPT_BYTES = 1 << 19
"""Bytes of each call that a gateway with a leak keeps."""


def install(name: str) -> None:
    """Install a mutant. Raises: KeyError for an unknown name."""
    module, patch = MUTANTS[name]
    after_import(module, patch)


def _leave_out_a_token(module: Any) -> None:
    """Drop the first token of the log when a request starts again; repeat the last one, so that the length is right."""
    admit = module.GroupState._admit

    def mutant(self: Any, admission: Any) -> Any:
        new = admit(self, admission)
        kept, log = new.tokens[: new.prompt_length], new.tokens[new.prompt_length :]
        return dataclasses.replace(new, tokens=(*kept, *log[1:], *log[-1:])) if len(log) > 1 else new

    module.GroupState._admit = mutant


def _use_a_neighbours_slots(module: Any) -> None:
    """Let a request read and write the keys and values of another one now and then."""
    extend, calls = module.KVCache.extend, count(1)

    def mutant(self: Any, handle: int, tokens: int) -> Any:
        own = extend(self, handle, tokens)
        others = (
            table.slot_of[:tokens]
            for other, table in self._tables.items()
            if other != handle and len(table.blocks) * self.block_tokens >= tokens
        )
        return next(others, own) if next(calls) % NEIGHBOUR_EVERY == 0 else own

    module.KVCache.extend = mutant


def _run_steps_again(module: Any) -> None:
    """Run a step twice that is offered twice."""
    admit = module.StepOrder.admit

    async def mutant(self: Any, epoch: Any, number: int, wait_s: float) -> Any:
        verdict = await admit(self, epoch, number, wait_s)
        return module.StepVerdict.ACCEPTED if verdict is module.StepVerdict.ALREADY_DONE else verdict

    module.StepOrder.admit = mutant


def _ignore_epochs(module: Any) -> None:
    """Let a stage run every step, of any epoch."""

    async def mutant(self: Any, epoch: Any, number: int, wait_s: float) -> Any:  # noqa: ARG001 - the method's shape
        self.last = number
        return module.StepVerdict.ACCEPTED

    module.StepOrder.admit = mutant


def _ignore_claims(module: Any) -> None:
    """Accept a commit from any claim, if it continues the log."""
    fence = "if r[3] ~= number or r[4] ~= claim_call or state == 'queued' then"
    script = module.Transition.__init__

    def mutant(self: Any, *args: Any) -> None:
        script(self, *args)
        if "local function commit_entry" in self.text:
            assert fence in self.text, "the fence of commit.lua has changed"
            self.text = self.text.replace(fence, "if false then")
            self.sha = module.hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    module.Transition.__init__ = mutant


def _forget_the_log(module: Any) -> None:
    """Let a matcher begin anew when its request starts again."""
    start = module.RequestMask.__init__

    def mutant(self: Any, params: Any, output: Any, shared: Any) -> None:  # noqa: ARG001 - the method's shape
        start(self, params, (), shared)

    module.RequestMask.__init__ = mutant


def _take_the_log_twice(module: Any) -> None:
    """Let a matcher take the log of a request that starts again twice."""
    start = module.RequestMask.__init__

    def mutant(self: Any, params: Any, output: Any, shared: Any) -> None:
        start(self, params, (*output, *output), shared)

    module.RequestMask.__init__ = mutant


def _remember_calls(module: Any) -> None:
    """Let a gateway keep some memory of each call that it answered."""
    start, kept = module.Delivery.__init__, []

    def mutant(self: Any, *args: Any) -> None:
        start(self, *args)
        kept.append(b"x" * KEPT_BYTES)

    module.Delivery.__init__ = mutant


MUTANTS = {
    "token left out": ("orca.scheduler.policy.state", _leave_out_a_token),
    "neighbour's slots": ("orca.worker.stage.kv_cache", _use_a_neighbours_slots),
    "step twice": ("orca.worker.controller.step_order", _run_steps_again),
    "epochs ignored": ("orca.worker.controller.step_order", _ignore_epochs),
    "calls remembered": ("orca.gateway.answer.delivery", _remember_calls),
    "log not consumed": ("orca.worker.masks.request_mask", _forget_the_log),
    "log consumed twice": ("orca.worker.masks.request_mask", _take_the_log_twice),
    "claims ignored": ("orca.pool.redis.transitions", _ignore_claims),
}
