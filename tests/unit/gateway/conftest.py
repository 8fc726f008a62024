"""A gateway whose requests a test can look at."""

from collections.abc import AsyncIterator
from functools import partial

import pytest

from orca.core.domain.request import Request
from support.gateway.gateway_rig import FakeScheduler, Rig, recording, rig


@pytest.fixture
def accepted() -> list[Request]:
    """The requests that the pool got."""
    return []


@pytest.fixture
async def one(accepted: list[Request]) -> AsyncIterator[Rig]:
    async with rig(make_scheduler=partial(FakeScheduler, answer=recording(accepted))) as made:
        yield made
