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
    new_request = module._new_request

    def mutant(admission: Any, blocks: Any) -> Any:
        new = new_request(admission, blocks)
        kept, log = new.tokens[: new.prompt_length], new.tokens[new.prompt_length :]
        return dataclasses.replace(new, tokens=(*kept, *log[1:], *log[-1:])) if len(log) > 1 else new

    module._new_request = mutant


def _use_a_neighbours_slots(module: Any) -> None:
    """Let a request read and write the keys and values of another one now and then."""
    extend, calls = module.KVCache.extend, count(1)

    def mutant(self: Any, handle: int, tokens: int, *start: int) -> Any:
        own, place = extend(self, handle, tokens, *start), (tokens - 1) // self.block_tokens
        others = (
            table.blocks[place]
            for other, table in self._tables.items()
            if other != handle and len(table.blocks) > place
        )
        if next(calls) % NEIGHBOUR_EVERY or (block := next(others, own)) == own:
            return own
        self.own.put(self._tables[handle].line, place, block)
        return block

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


def _begin_with_a_block_too_many(module: Any) -> None:
    """Let a request begin with one block more of the other one than the step says: both write to it."""
    share = module.KVCache.share

    def mutant(self: Any, handle: int, prefix: Any) -> None:
        share(self, handle, prefix)
        table, other = self._tables[handle], self._tables.get(prefix.handle)
        blocks = self.blocks.kept(prefix.handle) if other is None else other.blocks
        for block in blocks[prefix.blocks : prefix.blocks + 1]:
            self.blocks.hold([block])
            table.blocks.append(block)
            self.own.put(table.line, prefix.blocks, block)

    module.KVCache.share = mutant


def _share_blocks_of_another_request(module: Any) -> None:
    """Let a request begin with as many blocks as it should, but of another request that lives."""
    share = module.GroupPrefixes._share

    def mutant(self: Any, entry: Any, node: Any, changes: Any) -> None:
        share(self, entry, node, changes)
        right, place = changes.prefixes[entry.handle], node.depth - 1
        others = (
            table.handle
            for table in self.index.tables.values()
            if table.is_living and table.handle < entry.handle and table.blocks[place:]
            if table.blocks[place] is not node.block
        )
        changes.prefixes[entry.handle] = right._replace(handle=next(others, right.handle))

    module.GroupPrefixes._share = mutant


def _give_kept_blocks_away(module: Any) -> None:
    """Let the cache take blocks that it keeps for free ones: the next requests that need a block overwrite them."""
    keep = module.BlockStore.keep

    def mutant(self: Any, handle: int, blocks: list[int]) -> None:
        keep(self, handle, blocks)
        self.release(blocks)

    module.BlockStore.keep = mutant


def _send_no_evictions(module: Any) -> None:
    """Leave out of the steps what leaves the index: ranks keep blocks that the scheduler takes for free ones."""
    carry_out = module.GroupPrefixes.carry_out

    def mutant(self: Any, batch: Any) -> Any:
        changes = carry_out(self, batch)
        changes.evicted.clear()
        return changes

    module.GroupPrefixes.carry_out = mutant


MUTANTS = {
    "token left out": ("orca.scheduler.policy.state", _leave_out_a_token),
    "neighbour's slots": ("orca.worker.stage.kv_cache", _use_a_neighbours_slots),
    "step twice": ("orca.worker.controller.step_order", _run_steps_again),
    "epochs ignored": ("orca.worker.controller.step_order", _ignore_epochs),
    "calls remembered": ("orca.gateway.answer.delivery", _remember_calls),
    "log not consumed": ("orca.worker.masks.request_mask", _forget_the_log),
    "log consumed twice": ("orca.worker.masks.request_mask", _take_the_log_twice),
    "claims ignored": ("orca.pool.redis.transitions", _ignore_claims),
    "a block too many": ("orca.worker.stage.kv_cache", _begin_with_a_block_too_many),
    "a block of another request": ("orca.scheduler.policy.prefixes", _share_blocks_of_another_request),
    "a kept block overwritten": ("orca.worker.stage.kv_cache", _give_kept_blocks_away),
    "an eviction not sent": ("orca.scheduler.policy.prefixes", _send_no_evictions),
}
