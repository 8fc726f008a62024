"""The requests that the group owns in the pool during one epoch, from their claim to their end."""

import logging
from collections.abc import Callable, Mapping

from orca.core.domain.errors import EngineError
from orca.core.domain.request import End, FinishReason
from orca.core.domain.step import Claim, Epoch, Sampled
from orca.pool.records import Claimed, CommitAnswer, CommitEntry, Heartbeat
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.epoch.commit_queue import CommitQueue
from orca.scheduler.policy.batch import GroupRequest
from orca.scheduler.policy.finish import FinishDetector
from orca.scheduler.policy.state import GroupState

log = logging.getLogger("orca.scheduler")

_REASON_CHARACTERS_MAX = 300
"""A refusal's reason is stored in the log's end, whose bytes the pool has reserved."""


class OwnedRequests:
    """Keeps the claimed requests, their finish detectors and the commit queue in step with each other."""

    def __init__(
        self,
        dependencies: Dependencies,
        epoch: Epoch,
        block_tokens: int,
        state: GroupState,
        commit_queue: CommitQueue,
        *,
        wake: Callable[[], None],
        wake_committer: Callable[[], None],
    ) -> None:
        """
        Args:
            wake: called after a change of what can run or of how much can be claimed.
            wake_committer: called after a change of the commit queue that no result brought.
        """
        self._dependencies = dependencies
        self._epoch = epoch
        self._block_tokens = block_tokens
        self._state = state
        self._commit_queue = commit_queue
        self._wake = wake
        self._wake_committer = wake_committer
        self._detectors: dict[GroupRequest, FinishDetector] = {}
        self._owned: dict[str, GroupRequest] = {}  # the pool should list them as ours, until an answer denies it

    def adopt(self, claimed: Claimed) -> None:
        """Start to run a request that was claimed."""
        request, dependencies = claimed.request, self._dependencies
        if (older := self._owned.get(request.id)) is not None:
            self._drop(older, "claimed again")
        entry = self._state.add(
            request,
            claimed.claim,
            claimed.log,
            is_alone=claimed.is_alone,
            claimed_ns=dependencies.clock_ns(),
        )
        detector = FinishDetector(
            request,
            dependencies.eos_token_ids,
            dependencies.make_stop_string_matcher,
            forces_last_token=dependencies.forces_last_token,
        )
        self._owned[request.id] = entry
        self._detectors[entry] = detector
        dependencies.observer.claimed(request, len(claimed.log), claimed.slack_ms)
        if claimed.is_alone:
            dependencies.observer.isolated(request)
        log.info("request claimed", extra=self._fields(entry) | {"logged": len(claimed.log)})
        if claimed.log and (end := detector.replay(claimed.log)) is not None:
            # The log has all its tokens, and only the end is missing.
            self._end(entry, end)
            self._commit_queue.put(entry, end.count, None, end)
            self._wake_committer()
        elif (reason := dependencies.refuse(request)) is not None:
            self.refuse(entry, reason)
            self._wake_committer()

    def receive(self, entry: GroupRequest, sampled: Sampled) -> None:
        """Take the next token of a request. Raises: EngineError if it has another index."""
        if sampled.index != entry.received:
            raise EngineError(f"token {sampled.index} of {entry.request.id} came where {entry.received} was due")
        self._state.receive(entry, sampled.token.id)
        end = self._detectors[entry].push(sampled.token.id)
        if end is not None:
            self._end(entry, end)
        token = sampled.token
        if sampled.index == 0 and self._state.prefixes is not None:
            token = token._replace(cached_prompt_tokens=min(entry.prefix_tokens, len(entry.request.prompt)))
        self._commit_queue.put(entry, sampled.index, token, end)

    def refuse(self, entry: GroupRequest, reason: str) -> None:
        """End a request that cannot be run, after the tokens that it has. Its group and its neighbours go on."""
        self._state.end(entry, is_refused=True)
        end = End(FinishReason.REFUSED, entry.received, detail=reason[:_REASON_CHARACTERS_MAX])
        self._note_end(entry, end)
        self._commit_queue.put(entry, entry.received, None, end)
        log.warning("request refused", extra=self._fields(entry) | {"detail": end.detail})

    def settle(self, entry: GroupRequest, written: CommitEntry, answer: CommitAnswer) -> None:
        """Act on the pool's answer to a committed entry."""
        is_refused = answer in (CommitAnswer.ENDED, CommitAnswer.NOT_YOURS)
        if is_refused:
            log.info("commit refused", extra=self._fields(entry) | {"index": written.index, "answer": answer})
            self._drop(entry, answer)
        elif written.end is not None:
            self._disown(entry)
        elif entry.is_alone:
            self._state.acquit(entry, self._block_tokens)
            self._wake()

    def snapshot(self) -> dict[str, GroupRequest]:
        """Return the owned requests by id, to compare them with the answer of a heartbeat that is sent next."""
        return dict(self._owned)

    def drop_unlisted(self, heartbeat: Heartbeat, before: Mapping[str, GroupRequest]) -> None:
        """Drop the requests that the pool does not list, except those that came while the call was in progress."""
        for request_id, entry in before.items():
            if self._owned.get(request_id) is entry and heartbeat.owned.get(request_id) != entry.claim:
                self._drop(entry, "the pool does not list it")

    def unknown(self, heartbeat: Heartbeat, before: Mapping[str, GroupRequest]) -> dict[str, Claim]:
        """Return the requests that the pool lists and that were owned neither before the call nor after it."""
        return {
            request_id: claim
            for request_id, claim in heartbeat.owned.items()
            if request_id not in before and request_id not in self._owned
        }

    def _end(self, entry: GroupRequest, end: End) -> None:
        self._state.end(entry)
        self._note_end(entry, end)

    def _note_end(self, entry: GroupRequest, end: End) -> None:
        del self._detectors[entry]
        self._dependencies.observer.ended(entry.request, end.reason, end.count)
        fields = self._fields(entry) | {"reason": end.reason, "tokens": end.count}
        log.info("request ended", extra=fields)

    def _drop(self, entry: GroupRequest, reason: str) -> None:
        """Stop a request that is not ours any more: it is scheduled no further and its slots return."""
        if entry in self._detectors:
            log.info("request dropped", extra=self._fields(entry) | {"reason": reason})
            del self._detectors[entry]
        self._disown(entry)
        self._state.end(entry)
        self._commit_queue.forget(entry)
        self._wake()
        self._wake_committer()

    def _disown(self, entry: GroupRequest) -> None:
        if self._owned.get(entry.request.id) is entry:
            del self._owned[entry.request.id]

    def _fields(self, entry: GroupRequest) -> dict[str, object]:
        return {
            "request_id": entry.request.id,
            "claim": entry.claim.number,
            "epoch": self._epoch.number,
            "step": self._state.submitted,
        }
