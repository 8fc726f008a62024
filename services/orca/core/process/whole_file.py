"""Files that appear whole or not at all."""

import os
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Write a file by one rename: nobody reads half of it, and several processes may write it at the same time.

    Raises: OSError if it cannot be written; what was there before stays then.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(file)
