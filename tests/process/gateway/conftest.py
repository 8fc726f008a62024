"""Fixtures of the tests of the page at `/`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.gateway.browser import PROGRAM, Browser, running_browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One browser for all tests that use it. They run in the loop of the session."""
    if PROGRAM is None:
        pytest.skip("no Chromium is installed")
    async with running_browser(tmp_path_factory.mktemp("browser")) as one:
        yield one
