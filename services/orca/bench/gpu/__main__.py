"""Run `orca bench gpu` on a machine that has few libraries: `python -m orca.bench.gpu`."""

import sys

from orca.bench.gpu.command import main

sys.exit(main())
