"""The processor, the commit and the command that a bench writes beside its figures."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

_ZEN_4_MODELS = (0x1, 0x6, 0x7, 0xA)
"""Upper four bits of the models of AMD's family 25 that are Zen 4; its others are Zen 3."""

_LEFT_OUT = ("--figures", "--json", "--plot")
_REPLACED = {"--api-key": "KEY", "--url": "URL"}


def processor(cpuinfo: str | None = None, cores: int | None = None) -> str:
    """Return the short name of this machine's processor and how many of its cores this process may use.

    Args:
        cpuinfo: the content of /proc/cpuinfo (None: that of this machine).
        cores: None: as many as this process may run on.
    """
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if cpuinfo is None else cpuinfo
    count = len(os.sched_getaffinity(0)) if cores is None else cores
    return f"{_name(text)}, {count} core{'s' if count != 1 else ''}"


def _name(cpuinfo: str) -> str:
    first = cpuinfo.partition("\n\n")[0]
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\d+-Core Processor", "", said.get("model name", "unknown processor"))
    if said.get("vendor_id") == "AuthenticAMD":
        family, model = int(said["cpu family"]), int(said["model"])
        if family == 26:
            return "AMD Zen 5"
        if family == 25:
            return "AMD Zen 4" if model >> 4 in _ZEN_4_MODELS else "AMD Zen 3"
    elif "Xeon" in name:
        return "Intel Xeon with AMX" if "amx_tile" in said.get("flags", "").split() else "Intel Xeon"
    return " ".join(name.split())


def today() -> date:
    return datetime.now(UTC).date()


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the code that runs, with `-dirty` if tracked files differ from it. None: no checkout."""
    try:
        ended = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=7", "--match="],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # git is not installed
        return None
    return ended.stdout.strip() or None if ended.returncode == 0 else None


def shown_command(words: Sequence[str]) -> str:
    """Return a command line without what differs between users: output files, absolute paths, keys, addresses."""
    shown: list[str] = []
    waiting = list(words)
    while waiting:
        option, has_value, value = waiting.pop(0).partition("=")
        is_named = option in _LEFT_OUT or option in _REPLACED
        if is_named and not has_value and waiting:
            value = waiting.pop(0)
        if option in _LEFT_OUT:
            continue
        if option in _REPLACED:
            shown += [option, _REPLACED[option]]
        elif has_value:
            shown.append(f"{option}={_without_path(value)}")
        else:
            shown.append(_without_path(option))
    return shlex.join(shown)


def _without_path(word: str) -> str:
    return "PATH" if word.startswith(("/", "~", "./", "../")) else word
