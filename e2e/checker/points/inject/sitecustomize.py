"""Found by Python at the start of every process of a system under test (see checker.points)."""

from checker.points.injected import install

install()
