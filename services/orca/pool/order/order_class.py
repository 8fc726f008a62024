"""Order classes: waiting requests that an order of claims treats alike, but for their deadlines and ages.

A claim looks at classes and not at all requests. A class has one priority, one range of prompt lengths, one range of
`max_new_tokens`, one range of the fewest tokens that the output can have, and one kind of deadline. So its requests
have the same utility and the same expected length, and the class is sorted by deadline.

A class without a deadline is sorted by the time of submission. It may have one range of goals for the first token. The
goal counts as the lower bound of this range, at most a third sooner than the request has it. So the order by submission
is also the order by goal, and no request moves when its goal has passed.

The pool derives the class from a request's record whenever it queues it. Nothing stores it, so a later release may
divide requests in another way.
"""

from enum import StrEnum
from functools import cache, lru_cache
from math import frexp
from typing import NamedTuple

from orca.core.domain.request import Request
from orca.core.priority import LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY, priority_of


class DeadlineKind(StrEnum):
    """The event that a waiting request must reach by the deadline in force."""

    END = "end"
    FIRST_TOKEN = "first"
    NONE = "none"  # it has no deadline: patience decides (order_rules.py)


class OrderClass(NamedTuple):
    """The class of a waiting request. Its text is its name in the pool."""

    priority: int  # the lower, the more urgent
    prompt: int  # length class of the prompt
    output: int  # length class of max_new_tokens
    kind: DeadlineKind
    fewest: int = 0  # length class of the fewest tokens of the output: that of `output` if nothing can end it sooner
    goal: int = 0  # length class of the goal for the first token, in ms; 0 for none. Only without a deadline

    def __str__(self) -> str:
        goal = f"/{self.goal}" if self.goal else ""
        return f"{self.priority}/{self.prompt}/{self.output}/{self.fewest}/{self.kind}{goal}"


@lru_cache(maxsize=4096)
def class_named(name: str) -> OrderClass:
    """Return the class of a name. Raises: ValueError."""
    parts = name.split("/")
    priority, prompt, output, fewest, kind, goal = parts if len(parts) > 5 else (*parts, "0")
    return OrderClass(int(priority), int(prompt), int(output), DeadlineKind(kind), int(fewest), int(goal))


def length_class(tokens: int) -> int:
    """Return the class of a length: 1 or more tokens, or milliseconds. Lower bounds are 2^i and 1.5 x 2^i."""
    mantissa, exponent = frexp(tokens)
    return 2 * (exponent - 1) + (mantissa >= 0.75)


@cache  # a claim asks for every class, and there are some ten lengths
def middle_of(number: int) -> float:
    """Return the middle of the lengths of a class, in tokens."""
    return (lower_bound(number) + longest_of(number)) / 2


@cache
def longest_of(number: int) -> float:
    """Return the longest length of a class, in tokens."""
    return max(lower_bound(number), lower_bound(number + 1) - 1)


def lower_bound(number: int) -> float:
    """Return the shortest length of a class, in tokens or milliseconds."""
    octave, is_upper = divmod(number, 2)
    return float(2.0**octave * (1 + is_upper / 2))


def class_of(request: Request, kind: DeadlineKind, logged: int = 0) -> OrderClass:
    """Return the class of a request.

    Args:
        kind: of the deadline that is in force now.
        logged: tokens that it has from earlier claims. They are computed again with its prompt, and fewer follow.
    """
    prompt = length_class(len(request.prompt) + logged)
    output = length_class(max(1, request.max_new_tokens - logged))
    fewest = length_class(max(1, fewest_tokens(request) - logged))
    return OrderClass(whole_priority(request), prompt, output, kind, fewest, _goal_of(request, kind, logged))


def _goal_of(request: Request, kind: DeadlineKind, logged: int) -> int:
    """Return the class of the goal for the first token. A deadline counts alone, and so does a token that is there."""
    goal_ms = request.first_token_goal_ms
    if kind is not DeadlineKind.NONE or logged or goal_ms is None:
        return 0
    return max(1, length_class(goal_ms))  # 1 ms has the length class 0


def kind_in_force(request: Request, deadline_ms: int | None) -> DeadlineKind:
    """Return the kind of the deadline in force. Args: deadline_ms: wall clock of the pool; None if there is none."""
    if deadline_ms is None:
        return DeadlineKind.NONE
    return DeadlineKind.END if deadline_ms == request.deadline_wall_ms else DeadlineKind.FIRST_TOKEN


def whole_priority(request: Request) -> int:
    """Return the priority of a request, that of its weight."""
    if request.weight is not None and not request.weight > 0:
        return LEAST_URGENT_PRIORITY
    return max(MOST_URGENT_PRIORITY, min(LEAST_URGENT_PRIORITY, priority_of(request.weight)))


def fewest_tokens(request: Request) -> int:
    """Return the tokens that a request's output has at least: one, unless nothing may end it sooner.

    A grammar that is complete ends an output before `min_tokens` (EndingTokens).
    """
    sampling = request.sampling
    if sampling.grammar is not None:
        return 1
    if sampling.stop or sampling.stop_token_ids or not sampling.ignore_eos:
        return min(request.max_new_tokens, max(1, sampling.min_tokens))
    return request.max_new_tokens


def lua() -> str:
    """Return `length_class`, `lower_bound`, `middle_of`, `longest_of`, `class_of` and `class_named` for each script."""
    return """\
local function length_class(tokens)
  local mantissa, exponent = math.frexp(tokens)
  return 2 * (exponent - 1) + (mantissa >= 0.75 and 1 or 0)
end
local lower_bounds = {}  -- a claim asks for the same numbers again and again
local function lower_bound(number)
  lower_bounds[number] = lower_bounds[number] or 2 ^ math.floor(number / 2) * (1 + number % 2 / 2)
  return lower_bounds[number]
end
local function longest_of(number) return math.max(lower_bound(number), lower_bound(number + 1) - 1) end
local function middle_of(number) return (lower_bound(number) + longest_of(number)) / 2 end
local function class_of(r)
  local kind, goal = 'none', ''
  if r.deadline then
    kind = r.deadline_later and r.deadline_later ~= r.deadline and 'first' or 'end'
  elseif r.goal and r.logged == 0 then
    goal = '/' .. math.max(1, length_class(tonumber(r.goal)))
  end
  local prompt, output = length_class(r.prompt_tokens + r.logged), length_class(math.max(1, r.max_new - r.logged))
  local fewest = length_class(math.max(1, (r.fewest or 1) - r.logged))
  return string.format('%d/%d/%d/%d/%s%s', r.priority or 0, prompt, output, fewest, kind, goal)
end
local KINDS = { ['end'] = true, first = true, none = true }
-- Returns priority, prompt, output, fewest, kind and goal of a class; nil for a name that this release does not give.
local function class_named(name)
  local priority, prompt, output, fewest, kind, rest = string.match(name, '^(-?%d+)/(%d+)/(%d+)/(%d+)/(%a+)(.*)$')
  local goal = rest == '' and 0 or tonumber(string.match(rest or '', '^/(%d+)$'))
  if not (KINDS[kind] and goal) then return nil end
  return tonumber(priority), tonumber(prompt), tonumber(output), tonumber(fewest), kind, goal
end
"""
