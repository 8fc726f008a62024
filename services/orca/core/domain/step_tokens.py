"""The default number of tokens in a step, the same on one machine and on a cluster."""

CPU_STEP_TOKENS = 256
"""Fewer tokens cost throughput on a CPU; more let generating requests wait for prompts (`orca bench chunks`)."""


def max_batch_tokens(asked: int | None, *, device: str, policy: str, max_batch_size: int) -> int | None:
    """Return the most tokens in a step; None runs prompts whole, as in the paper.

    The default leaves prompts at least as many tokens of a step as a full batch of increments takes.

    Args:
        asked: the user's setting: 0 for whole prompts, None for the default.
        device: where stages compute. For a GPU no limit was measured, so the default there is whole prompts.
    """
    if asked is not None:
        return asked or None
    if device != "cpu" or policy != "iteration":
        return None
    return max(CPU_STEP_TOKENS, 2 * max_batch_size)
