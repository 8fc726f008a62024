"""Every conversion between orca.core.domain.step and engine_pb2.

Stop strings are left out on purpose: the scheduler matches them on text, and no stage ever sees them. A top_k that
keeps all tokens is None in our types and 0 on the wire; no grammar is None in our types and empty on the wire.
"""

from orca.core.domain.errors import EngineError
from orca.core.domain.request import Logprob, SamplingParams, Token
from orca.core.domain.step import (
    Claim,
    Epoch,
    NewRequest,
    Part,
    PrefixBlocks,
    Refused,
    Row,
    Sampled,
    StageTiming,
    Step,
    StepResult,
)
from orca.core.transport import engine_pb2 as pb

CONTRACT = 4
"""Version of the messages for steps and results. It rises when one of them changes, also by a new field, and with each
new llguidance, which may allow other tokens. Scheduler and stages of one group must mean the same, so a group with two
versions is not formed."""


_NO_PART = Part.UNSPECIFIED  # bound once: a member of an Enum is looked up slowly, and there is a row for each token
_WIRE_PARTS = {
    Part.UNSPECIFIED: pb.Row.PART_UNSPECIFIED,
    Part.SOURCE: pb.Row.SOURCE,
    Part.TARGET: pb.Row.TARGET,
}
_PARTS = {on_wire: part for part, on_wire in _WIRE_PARTS.items()}


def require_same_contract(contract: int, who: str) -> None:
    """
    Args:
        contract: reported by `who`, a stage or the scheduler; 0 from releases before the number, which meant 1.
    Raises: EngineError.
    """
    theirs = contract or 1
    if theirs != CONTRACT:
        raise EngineError(
            f"{who} is of another release: it has contract {theirs} of scheduler and stages, this one has {CONTRACT}"
        )


def epoch_to_wire(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(number=epoch.number, holder=epoch.holder)


def epoch_from_wire(message: pb.Epoch) -> Epoch:
    """Return the epoch; its number is 0 and its holder empty if the message has none."""
    return Epoch(message.number, message.holder)


def step_to_wire(step: Step) -> pb.StepMessage:
    return pb.StepMessage(
        epoch=epoch_to_wire(step.epoch),
        number=step.number,
        freed=step.freed,
        kept=step.kept,
        evicted=[_prefix_to_wire(each) for each in step.evicted],
        added=[_new_to_wire(new) for new in step.new],
        rows=[
            pb.Row(handle=row.handle, start=row.start, count=row.count, sample=row.sample, token=row.token)
            if row.part is _NO_PART
            else _part_to_wire(row)
            for row in step.rows
        ],
        lane=step.lane,
    )


def step_from_wire(message: pb.StepMessage) -> Step:
    rows = tuple(
        Row(row.handle, row.start, row.count, row.sample, row.token if row.HasField("token") else None)
        for row in message.rows
    )
    # All rows of an encoder-decoder model have a part. Otherwise it is not read: there is a row for each token.
    if rows and message.rows[0].part:
        for row, on_wire in zip(rows, message.rows, strict=True):
            row.part = _PARTS[on_wire.part]
    return Step(
        epoch=epoch_from_wire(message.epoch),
        number=message.number,
        freed=tuple(message.freed),
        kept=tuple(message.kept),
        evicted=tuple(_prefix_from_wire(each) for each in message.evicted),
        new=tuple(_new_from_wire(new) for new in message.added),
        rows=rows,
        lane=message.lane,
    )


def result_to_wire(result: StepResult) -> pb.ResultMessage:
    return pb.ResultMessage(
        epoch=epoch_to_wire(result.epoch),
        number=result.number,
        sampled=[_sampled_to_wire(sampled) for sampled in result.sampled],
        refused=[pb.Refused(handle=refused.handle, reason=refused.reason) for refused in result.refused],
        timing=None if result.timing is None else _timing_to_wire(result.timing),
    )


def result_from_wire(message: pb.ResultMessage) -> StepResult:
    return StepResult(
        epoch=epoch_from_wire(message.epoch),
        number=message.number,
        sampled=tuple(_sampled_from_wire(sampled) for sampled in message.sampled),
        refused=tuple(Refused(refused.handle, refused.reason) for refused in message.refused),
        timing=_timing_from_wire(message.timing) if message.HasField("timing") else None,
    )


def _part_to_wire(row: Row) -> pb.Row:
    """Return a row of an encoder-decoder model."""
    return pb.Row(
        handle=row.handle,
        start=row.start,
        count=row.count,
        sample=row.sample,
        token=row.token,
        part=_WIRE_PARTS[row.part],
    )


def _new_to_wire(new: NewRequest) -> pb.NewRequest:
    return pb.NewRequest(
        handle=new.handle,
        request_id=new.request_id,
        claim=pb.Claim(number=new.claim.number, call=new.claim.call),
        tokens=new.tokens,
        prompt_length=new.prompt_length,
        max_total_tokens=new.max_total_tokens,
        sampling=_sampling_to_wire(new.sampling),
        decoder_prefix=new.decoder_prefix,
        max_new_tokens=new.max_new_tokens or 0,
        prefix=None if new.prefix is None else _prefix_to_wire(new.prefix),
    )


def _new_from_wire(message: pb.NewRequest) -> NewRequest:
    return NewRequest(
        handle=message.handle,
        request_id=message.request_id,
        claim=Claim(message.claim.number, message.claim.call),
        tokens=tuple(message.tokens),
        prompt_length=message.prompt_length,
        max_total_tokens=message.max_total_tokens,
        sampling=_sampling_from_wire(message.sampling),
        decoder_prefix=tuple(message.decoder_prefix),
        max_new_tokens=message.max_new_tokens or None,
        prefix=_prefix_from_wire(message.prefix) if message.HasField("prefix") else None,
    )


def _prefix_to_wire(prefix: PrefixBlocks) -> pb.PrefixBlocks:
    return pb.PrefixBlocks(handle=prefix.handle, blocks=prefix.blocks)


def _prefix_from_wire(message: pb.PrefixBlocks) -> PrefixBlocks:
    return PrefixBlocks(message.handle, message.blocks)


def _sampling_to_wire(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_tokens=[token for token, _ in sampling.logit_bias],
        bias_values=[bias for _, bias in sampling.logit_bias],
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        grammar=sampling.grammar or "",
        allowed_token_ids=sampling.allowed_token_ids,
        forbidden_token_ids=sampling.forbidden_token_ids,
        forbidden_sequences=[pb.TokenSequence(tokens=sequence) for sequence in sampling.forbidden_sequences],
    )


def _sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k or None,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.bias_tokens, message.bias_values, strict=True)),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=message.grammar or None,
        allowed_token_ids=tuple(message.allowed_token_ids),
        forbidden_token_ids=tuple(message.forbidden_token_ids),
        forbidden_sequences=tuple(tuple(sequence.tokens) for sequence in message.forbidden_sequences),
    )


def _sampled_to_wire(sampled: Sampled) -> pb.Sampled:
    token = sampled.token
    return pb.Sampled(
        handle=sampled.handle,
        index=sampled.index,
        token=token.id,
        logprob=None if token.logprob is None else _logprob_to_wire(token.logprob),
        prompt_logprobs=[_logprob_to_wire(logprob) for logprob in token.prompt_logprobs],
    )


def _sampled_from_wire(message: pb.Sampled) -> Sampled:
    return Sampled(message.handle, message.index, _token_from_wire(message))


def _token_from_wire(message: pb.Sampled) -> Token:
    has_logprob = message.HasField("logprob")
    if not has_logprob and not message.prompt_logprobs:
        # True for nearly all of them, and there is one for each row of a step.
        return Token(message.token)
    return Token(
        id=message.token,
        logprob=_logprob_from_wire(message.logprob) if has_logprob else None,
        prompt_logprobs=tuple(map(_logprob_from_wire, message.prompt_logprobs)),
    )


def _logprob_to_wire(logprob: Logprob) -> pb.Logprob:
    return pb.Logprob(
        token=logprob.token,
        logprob=logprob.logprob,
        top_tokens=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def _logprob_from_wire(message: pb.Logprob) -> Logprob:
    top = zip(message.top_tokens, message.top_logprobs, strict=True)
    return Logprob(message.token, message.logprob, tuple(top))


def _timing_to_wire(timing: StageTiming) -> pb.StageTiming:
    return pb.StageTiming(
        stage=timing.stage, received_ns=timing.received_ns, start_ns=timing.start_ns, end_ns=timing.end_ns
    )


def _timing_from_wire(message: pb.StageTiming) -> StageTiming:
    return StageTiming(
        stage=message.stage, received_ns=message.received_ns, start_ns=message.start_ns, end_ns=message.end_ns
    )
