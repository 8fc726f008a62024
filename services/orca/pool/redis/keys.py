"""The one page of truth about the pool in Redis: every key, its type, its meaning and its lifetime.

All keys of a deployment begin with `orca:{<deployment>}:`. The braces are a hash tag: a Redis cluster keeps all of them
in one slot, so a script that was routed by one of them may touch the others. That is why each script declares a single
key, `meta`, and builds the rest from it. Some transitions (enter, leave, sweep) only learn inside the script which
requests they touch. The hash tag puts those keys into the declared key's slot by construction.

Key names are built in this file only; the Lua scripts get their builders from `lua_key_builders`.

name                type    meaning                                                        lifetime
meta                hash    schema, clock, counters, current revision (fields below)       for ever
par:<parent>        hash    a parent's state (fields below)                                until retention
render:<parent>     string  data with which a gateway writes the answer; opaque here       until retention
readers:<parent>    zset    reader -> awake ms at which its lease ends                     until retention
req:<id>            hash    a request's state (fields below)                               until retention
body:<id>           string  the constant part of a request: prompt, sampling (codec.py)    until retention
log:<id>            stream  token i at id (i+1)-0, then the end at (count+1)-0 (codec.py)  first token until retention
q:<revision>        zset    queued request -> arrival number                               while queued
classes:<revision>  hash    order class -> its waiting requests; the field '' says, while  until its records are gone,
                            the index is kept, how far it is built (waiting_index.lua)     if groups claim by an order
waiting:<class>     zset    "<arrival> <request>" -> deadline in force, or time of         while queued, if `classes`
                            submission if it has none (wall clock ms); the name of a       has its revision
                            class is "<revision>/<order class>"
steps:<revision>    hash    least_ms: the fastest step that a group of it has seen         until its records are gone
own:<group>         hash    request -> "<claim number> <claim call>"                       while owned
seat:<group>        hash    holder, epoch, last calls and answers (fields below)           for ever, one per group name
seats               zset    group -> awake ms at which its seat's lease ends               while the lease lives
closed_at           zset    process that has left -> awake ms; it may own nothing again    a day (contract.py)
watch               zset    parent -> awake ms at which it counts as unread                until ended; not for `keep`
forgotten           zset    parent that was forgotten on demand -> awake ms                a minute (contract.py), if a
                                                                                           release that knows it sweeps
deadlines           zset    request -> deadline in force, wall clock ms                    until ended
ended               zset    parent -> awake ms when its last request ended                 until retention
retired             zset    revision -> awake ms at which its requests end                 until they have
replaced            zset    revision that was current -> awake ms at which its last        until then, and while
                            record goes; +inf while it has unfinished requests, 0 when     it is retired
                            nothing of it is left
parts               zset    "<oldest schema> <newest> <part>" -> awake ms, end of its lease  while the lease lives
promises            hash    revision -> slots that submit promises: those of the first     for ever, one per revision
                            group that formed, until the promise is replaced
blocks              hash    revision -> tokens in a KV block of its groups                 for ever, one per revision
lengths:<period>    hash    lengths of the answers that ended in a period (fields below)   four hours (length_bins.py),
                                                                                           if a release that knows it
                                                                                           sweeps
latencies:<period>  hash    latencies of the same answers (fields below)                   four hours, as lengths
outcomes:<period>   hash    deadlines of the requests that ended in it (fields below)      four hours, as lengths
periods             zset    period with such hashes -> awake ms at which all go            four hours, as its hashes
results:<key>       string  result of a Job of the operator; opaque here                   an hour of Redis' clock
                                                                                           (contract.py)
news                channel hints, one a line: "<id> <entries>" per log that grew, then    not kept
                            perhaps its last entries (prelude.lua); "+<revision>" per
                            request that came to its queue

- meta: schema (number in force), awake_ms (the pool's awake time), wall_ms (TIME of the last script), arrival (last
    number given), revision and generation (current), bytes (reserved), queued, owned, ended (requests in each state),
    queued_prompt_tokens, wanted_bytes and wanted_ms (a submission was refused because `bytes` exceeded wanted_bytes, at
    this awake time), ended_ever (requests that have ended, forgotten ones too), unserved_ever (those of them that ended
    while they waited), written:<schema> (requests whose records were written under it).
- req: schema, state (queued | owned | ended), revision, arrival, submitted_ms, need (tokens of its own block table),
    source (tokens of the second table, only if it has a decoder prefix), prompt_tokens, max_new, bytes (reserved now),
    token_bytes (reserved per token that may still come), deadline (the one in force, wall clock ms, if there is one),
    deadline_later (only while it has no token and the first token changes its deadline: the later deadline, or empty
    for none), number and call (claim; call is empty while queued and unchanged by the end), group and process (owner),
    first_claimed_ms, first_step_ms, first_token_ms and ended_ms (wall clock; absent before; the first step is known
    with the first token, if that came under the first claim), starts_by_ms (the end of its start window or patience, by
    the wall clock, as its first claim saw it; absent if that was by arrival), first_in_time (1 or 0: the first token
    met its deadline; absent before it, and without such a deadline), mark ("<epoch> <group>" of the seat that it is
    reserved for), priority (absent means 0), fewest (tokens that its output has at least, absent means 1), goal (ms
    from submission in which its first token should come, absent means no goal), trial (1 from a claim to its first
    commit, otherwise empty) and failures (in a row; both in poison.py, absent means none).
- par: schema, choices (how many requests), left (not ended yet), on_disconnect, owner, digest,
    conversation (only where a later call may go on from it).
- seat: holder (process, empty when free), epoch, revision, last_call (highest call number of the holder); answers to
    repeated calls: enter_call, failed and poisoned ("<id> ..."), claim_call and claim_answer ("<blocked 0|1> <waiting>
    <id> <number> ..."); unformed (the holder, while it reports that the group does not serve); lasting_offer ("<holder>
    <slots>": the most that one request may need, while the holder reports it; otherwise empty); by_order ("<holder>
    <milliseconds of its fastest step, 0 if unknown>" if its last claim was by another order than arrival; otherwise
    empty), order ("<holder> <arguments of that claim>", see script_format.order_arguments; otherwise empty).
- lengths: "<prompt bin>,<output bin>" -> answers that ended by `stop` or `length`; cut (those of them that ended by
    `length`; absent means none). The name of a period is "<revision>:<number>". It has one meaning, because the
    number has only digits and stands behind the last colon.
- latencies: "<latency>,<bin>" -> the same answers, where a latency has its place in `latency_bins.LATENCIES`; first_ms
    (awake ms at which the first answer of the period ended). The name of a period is that of `lengths`.
- outcomes: in_time, late (requests that had a deadline; deadline_outcome.py has the rule). The name of a period is that
    of `lengths`.

Memory was measured on Redis 6.2.14 and 7.0.15 (orca.bench.parts.pool). A waiting request with a prompt of 64 tokens
uses 1.7 KB in all its keys. A log uses 0.5 KB plus its last node (1 KiB in the embedded server, 4 KiB by default). A
token uses 10 to 19 bytes, with 5 log probabilities some 110, with 20 some 310. Admission reserves more (codec.py).
Buffers of the append-only file do not count against maxmemory: Redis itself leaves them out.

The hashes `lengths` have at most 25 periods per revision, and in each at most one cell per answer. A model of 131,072
tokens has 121 bins per side, so at most 14,641 cells. Up to 512 cells use 10 bytes each, more of them 50 to 93. With
100, 1,000 and 14,641 cells in each period a revision uses 25 KB, 2 MB and 30 MB. A hash `latencies` has at most 5,120
cells. If each latency of a period differs by a factor of 8, it has some 500 and 5 KB, so 25 periods use 0.1 MB. With
all cells they use 7 MB. Admission does not count these hashes: they belong to the fifth of the memory that
`codec.room_for_requests` leaves to Redis.

Schema number: one is in force, and each record carries the number under which it was written. A release reads and
writes a range of numbers (schemas.py), and its scripts write the one in force. A script refuses to do anything if the
number in force is outside its range. A queue skips a record whose number is outside the range.
"""

NAMED = (
    "par",
    "render",
    "readers",
    "req",
    "body",
    "log",
    "q",
    "classes",
    "waiting",
    "steps",
    "own",
    "seat",
    "lengths",
    "latencies",
    "outcomes",
    "results",
)
SINGLE = (
    "meta",
    "seats",
    "closed_at",
    "watch",
    "forgotten",
    "deadlines",
    "ended",
    "retired",
    "replaced",
    "promises",
    "blocks",
    "parts",
    "periods",
    "news",
)


class Keys:
    """The key names of one deployment."""

    def __init__(self, deployment: str) -> None:
        if not deployment or any(char in deployment for char in "{}: \n"):
            raise ValueError(f"a deployment's name must be free of braces, colons and spaces: {deployment!r}")
        self.prefix = f"orca:{{{deployment}}}:"

    def single(self, kind: str) -> str:
        """Return the key of a kind of which a deployment has one."""
        assert kind in SINGLE, kind
        return self.prefix + kind

    def named(self, kind: str, name: str) -> str:
        """Return the key of a kind that belongs to one parent, request, revision, group or Job."""
        assert kind in NAMED, kind
        return f"{self.prefix}{kind}:{name}"


def lua_key_builders() -> str:
    """Return Lua for the head of each script: `<kind>_key(name)` for named kinds, `<KIND>` for single ones."""
    lines = ["local PREFIX = string.sub(KEYS[1], 1, -5)  -- KEYS[1] is meta"]
    lines += [f"local {kind.upper()} = PREFIX .. '{kind}'" for kind in SINGLE]
    lines += [f"local function {kind}_key(name) return PREFIX .. '{kind}:' .. name end" for kind in NAMED]
    return "\n".join(lines) + "\n"
