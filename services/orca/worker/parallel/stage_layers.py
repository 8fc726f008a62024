"""The setting `--layers`: how many of the model's layers each stage holds. Without it, stages differ by at most one."""

from orca.core.domain.errors import BadValue


def read_layers(text: str, *, stages: int, num_layers: int) -> tuple[int, ...]:
    """Read `10,6,8`: the number of layers of each stage, stage 0 first.

    Raises: BadValue unless these are as many numbers as stages, each above 0, whose sum is `num_layers`.
    """
    counts: tuple[int, ...] = ()
    try:
        counts = tuple(int(part) for part in text.split(","))
        complaint = _complaint(counts, stages, num_layers)
    except ValueError:
        complaint = "is not a comma-separated list of whole numbers"
    if complaint is not None:
        over = "1 stage" if stages == 1 else f"{stages} stages"
        rule = f"divide the model's {num_layers} layers over {over}, at least one for each"
        raise BadValue("--layers", f"{text!r} {complaint}: {rule}")
    return counts


def _complaint(counts: tuple[int, ...], stages: int, num_layers: int) -> str | None:
    if len(counts) != stages:
        return f"has {len(counts)} number{'' if len(counts) == 1 else 's'}"
    if min(counts) < 1:
        return f"gives {min(counts)} layers to a stage"
    if sum(counts) != num_layers:
        return f"adds up to {sum(counts)}"
    return None
