"""A Redis for tests of the operator, with the login of a user."""

from collections.abc import Iterator

import pytest

from orca.pool.redis.access import LOCAL_USER, LocalAccess
from orca.pool.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URL and login of a Redis on loopback, whose user may touch every deployment's keys."""
    folder = tmp_path_factory.mktemp("redis")
    access = LocalAccess.prepare(folder, "any")
    access.acl_file.write_text(f"user default off\nuser {LOCAL_USER} on >{access.password} ~* &* +@all\n")
    with EmbeddedRedis(folder, access=access, port=0) as redis:
        yield {"url": redis.url, "user": LOCAL_USER, "password": access.password}
