"""Records of schema 2 in Redis, byte for byte as that release wrote them: literals, so that they stay.

One deployment with two requests: `old.0` runs on group g1 and has two tokens, `over.0` was ended by its stop string.
"""

from redis.asyncio import Redis

from orca.pool.redis.keys import Keys

BODY = (
    b'w\x00\x00\x00["old",0,"r1",12,{"temperature":0.5,"logit_bias":[[3,-1.5]],"seed":7,"stop_token_ids":[9],'
    b'"stop":["a"]},null,null,9000]\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00'
)
BODY_OVER = (
    b'\x1f\x00\x00\x00["over",0,"r1",12,{},null,null]\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00'
)
TOKEN_WITH_LOGPROBS = (
    b"L\x05\x00\x00\x00\x01\x05\x00\x00\x00\x00\x00\x00\x00\x00\x00\xd0\xbf\x02\x00\x00\x00\x05\x00\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\xd0\xbf\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\xf8\xbf\x00\x00\x00\x00"
)

HASHES = {
    ("meta",): (
        b"schema 2 awake_ms 5000 wall_ms 1700000000000 revision r1 generation 1 arrival 2 bytes 14000 queued 0 owned 1 "
        b"ended 1 ended_ever 1 queued_prompt_tokens 0 written:2 2"
    ),
    ("par", "old"): b"schema 2 choices 1 left 1 on_disconnect keep owner  digest ",
    ("par", "over"): b"schema 2 choices 1 left 0 on_disconnect keep owner  digest ",
    ("req", "old.0"): (
        b"schema 2 state owned number 1 call p1/2 trial  revision r1 arrival 1 submitted_ms 1700000000000 need 16 "
        b"prompt_tokens 4 max_new 12 bytes 8000 token_bytes 24 group g1 process p1 "
        b"first_claimed_ms 1700000000100 failures 0"
    ),
    ("req", "over.0"): (
        b"schema 2 state ended number 1 call p1/2 trial  revision r1 arrival 2 submitted_ms 1700000000000 need 16 "
        b"prompt_tokens 4 max_new 12 bytes 6000 token_bytes 24 group  process  "
        b"first_claimed_ms 1700000000100 failures 0"
    ),
    ("own", "g1"): b"old.0 1~p1/2",
    ("seat", "g1"): (
        b"holder p1 epoch 3 revision r1 last_call 2 enter_call 1 claim_call 2 "
        b"claim_answer 0~0~old.0~1~over.0~1 "
        b"failed  poisoned "
    ),
    ("promises",): b"r1 1024",
}
"""Names and values in turn, parted by spaces; a tilde stands for a space inside of a value."""

STRINGS = {
    ("body", "old.0"): BODY,
    ("body", "over.0"): BODY_OVER,
    ("render", "old"): b'{"kind":"test"}',
    ("render", "over"): b'{"kind":"test"}',
}
SORTED = {("seats",): ("g1", 8000), ("ended",): ("over", 4000)}
LOGS = {
    "old.0": [{"token": TOKEN_WITH_LOGPROBS, "claim": b"1"}, {"token": b"70000", "claim": b"1"}],
    "over.0": [
        {"token": b"7", "claim": b"1"},
        {"token": b"8", "claim": b"1"},
        {"end": b"stop", "count": b"2", "stop": b'"a"', "claim": b"1"},
    ],
}


async def write_schema_2(redis: Redis, keys: Keys) -> None:
    """Write the records into an empty deployment."""
    for names, text in HASHES.items():
        words = [word.replace(b"~", b" ") for word in text.split(b" ")]
        await redis.hset(_key(keys, names), mapping=dict(zip(words[::2], words[1::2], strict=True)))
    for names, value in STRINGS.items():
        await redis.set(_key(keys, names), value)
    for names, (member, score) in SORTED.items():
        await redis.zadd(_key(keys, names), {member: score})
    for request, entries in LOGS.items():
        for place, fields in enumerate(entries, start=1):
            await redis.xadd(keys.named("log", request), dict(fields), id=f"{place}-0")


def _key(keys: Keys, names: tuple[str, ...]) -> str:
    return keys.named(*names) if len(names) == 2 else keys.single(*names)
