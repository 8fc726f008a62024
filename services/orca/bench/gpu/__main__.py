"""`python -m orca.bench.gpu` is `orca bench gpu` for a machine that has few libraries."""

import sys

from orca.bench.gpu.command import main

sys.exit(main())
