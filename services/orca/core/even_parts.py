"""The one rule for numbers that do not divide evenly: layers over stages, heads and columns over ranks."""


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the parts: the first `total % parts` of them get one more than the others."""
    small, larger = divmod(total, parts)
    return tuple(small + (index < larger) for index in range(parts))
