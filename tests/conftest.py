"""Puts tests/ on the import path, so that shared builders (tiny_models) can be imported from every room's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
