"""How many tokens a step takes where a person leaves it open: of one machine and of a cluster alike."""

CPU_STEP_TOKENS = 256
"""Fewer cost throughput on a CPU, more let generating requests wait for prompts: `orca bench chunks` (cli/bench)."""


def max_batch_tokens(asked: int | None, *, device: str, policy: str, max_batch_size: int) -> int | None:
    """Most tokens in a step; None runs prompts whole, as in the paper.

    A default leaves prompts as much of a step as a full batch of increments takes, or more.

    Args:
        asked: by a person: 0 for whole prompts, None for the default.
        device: where stages compute. How large a step may be on a GPU was not measured: its default is whole prompts.
    """
    if asked is not None:
        return asked or None
    if device != "cpu" or policy != "iteration":
        return None
    return max(CPU_STEP_TOKENS, 2 * max_batch_size)
