"""The argument parser of `orca` commands that have no settings dataclass (settings.py)."""

import argparse
from typing import Any, NoReturn

from orca.core.domain.errors import SettingError


class CommandLineParser(argparse.ArgumentParser):
    """Reports a bad command line by a SettingError, as every `orca` command does."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **arguments})

    def error(self, message: str) -> NoReturn:
        raise SettingError(message)
