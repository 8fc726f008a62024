"""Processes as the kernel knows them (proc(5)): the fields of one, and all below one."""

from pathlib import Path


def stat_fields(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name; none if there is no such process."""
    try:
        # The second field is the command's name in brackets, which may hold spaces and brackets itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(root: int) -> dict[int, tuple[str, ...]]:
    """Return the command lines of a process and of all its living children and theirs, by process id."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):  # it may have ended meanwhile
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, tuple[str, ...]] = {}
    newest = {root} & parents.keys()
    while newest:
        found |= {pid: _command(pid) for pid in newest}
        newest = {pid for pid, parent in parents.items() if parent in newest} - found.keys()
    return found


def _command(pid: int) -> tuple[str, ...]:
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0"))
    except OSError:
        return ()
