"""The lengths of spec.slo.workload, as far as the pattern of the CRD cannot check them.

A mistake is refused at once: otherwise only the Job of the plan would find it, after the model was measured.
"""

DEVIATION_MAX = 1_000_000
"""Largest standard deviation, as for `orca plan --workload`."""


def find_problem(lengths: str) -> str | None:
    """Return why lengths that match the pattern make no sense; None if they do."""
    for side, text in zip(("prompts", "outputs"), lengths.split("/"), strict=True):
        if (problem := _problem_of(text)) is not None:
            return f"{side} {text}: {problem}"
    return None


def _problem_of(text: str) -> str | None:
    """Args: text: N, LEAST:MOST, or LEAST:MOST:MEAN:DEVIATION."""
    numbers = [float(each) for each in text.split(":")]
    if len(numbers) > 1 and numbers[0] > numbers[1]:
        return "LEAST is above MOST"
    if len(numbers) < 4:
        return None
    least, most, mean, deviation = numbers
    if not least <= mean <= most:
        return "MEAN is not between LEAST and MOST"
    if not 0 < deviation <= DEVIATION_MAX:
        return f"DEVIATION must be above 0 and at most {DEVIATION_MAX}"
    return None
