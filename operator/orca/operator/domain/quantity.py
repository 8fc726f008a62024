"""Amounts as Kubernetes writes them: `1000m` and `1` are the same, and the API server writes the shorter one."""

import re
from decimal import Decimal

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([num]|[kMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
_FACTORS = {
    "": Decimal(1),
    **{letter: Decimal(10) ** power for letter, power in (("n", -9), ("u", -6), ("m", -3))},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}


def is_same_quantity(first: object, second: object) -> bool:
    """Return whether both are amounts, and equal."""
    amount = _amount(first)
    return amount is not None and amount == _amount(second)


def is_less(first: object, second: object) -> bool:
    """Return whether both are amounts, and the first is the smaller one."""
    amounts = _amount(first), _amount(second)
    return amounts[0] is not None and amounts[1] is not None and amounts[0] < amounts[1]


def times(value: object, factor: int) -> str:
    """Return an amount so many times, in its own unit. Anything else stays, and the API server refuses it."""
    found = None if isinstance(value, bool) else _FORM.fullmatch(str(value))
    return str(value) if found is None else f"{Decimal(found[1]) * factor:f}{found[2] or ''}"


def _amount(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    # YAML reads 2e9 as a floating-point number.
    found = _FORM.fullmatch(str(value))
    if found is None:
        return None
    number, suffix = Decimal(found[1]), found[2] or ""
    return number * _FACTORS[suffix] if suffix in _FACTORS else Decimal(found[0])
