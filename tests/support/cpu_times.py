"""Processor time of each test, for `make test-times`: it tells more than seconds do on a machine that is busy."""

import os
from collections.abc import Generator

import pytest

PROPERTY = "cpu_s"
"""Name of the property in the JUnit report: seconds, of this process and of its child processes that have ended."""


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure setup and call; a report is written before its teardown has ended."""
    item.stash[_BEGAN] = _cpu_s()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":
        item.user_properties.append((PROPERTY, f"{_cpu_s() - item.stash[_BEGAN]:.2f}"))


_BEGAN = pytest.StashKey[float]()


def _cpu_s() -> float:
    user, system, childrens_user, childrens_system, _ = os.times()
    return user + system + childrens_user + childrens_system
