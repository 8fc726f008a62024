"""A commit as its script takes it: all entries in one word. A step has hundreds, and each word is packed by itself.

a line per entry      request, claim number, claim call, index, reason or -, n, tokens ...
n words behind it     its tokens, where one of them has log probabilities and all are bytes; 0 where the line has them
and one word more     what stopped it, where the entry has an end
"""

from collections.abc import Sequence

from orca.pool import codec
from orca.pool.contract import check_entry
from orca.pool.records import CommitEntry


def commit_words(entries: Sequence[CommitEntry]) -> list[str | bytes]:
    """The script's arguments."""
    lines: list[str] = []
    values: list[bytes] = []
    for entry in entries:
        check_entry(entry)
        claim, tokens, end = entry.claim, entry.tokens, entry.end
        if all(map(codec.is_plain, tokens)):
            told = "".join([f" {token.id}" for token in tokens])
            packed = 0
        else:
            told = ""
            packed = len(tokens)
            values += map(codec.pack_token, tokens)
        reason = "-" if end is None else end.reason.value
        lines.append(f"{entry.request_id} {claim.number} {claim.call} {entry.index} {reason} {packed}{told}")
        if end is not None:
            values.append(codec.pack_stop(end))
    return ["\n".join(lines), *values]
