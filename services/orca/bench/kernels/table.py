"""The table that all parts share. A figure that was not measured is a dash, or empty in a column that few rows have."""

HEAD = (
    f"{'operation':44} {'ms':>9} {'limit':>9} {'':8} {'share':>6} {'beside':>8} {'host gap':>8}  result\n"
    f"{'':44} {'':9} {'':9} {'':8} {'':6} {'others':>8} {'ms':>8}"
)


def line(
    name: str,
    result: str,
    *,
    seconds: float | None,
    limit_s: float | None,
    limit: str,
    beside: float | None = None,
    host_gap: str = "",
) -> str:
    """
    Args:
        limit: its kind: memory or products.
        beside: the other system's time divided by ours.
        host_gap: in milliseconds, or a dash.
    """
    share = "-" if seconds is None or limit_s is None else f"{limit_s / seconds:.0%}"
    others = "" if beside is None else f"{beside:.2f} x"
    times = f"{milliseconds(seconds):>9} {milliseconds(limit_s):>9} {limit:8}"
    return f"{name:44} {times} {share:>6} {others:>8} {host_gap:>8}  {result}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"
