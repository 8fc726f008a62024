"""The Redis that tests of the operator share."""

from support.operator.redis_login import redis_login

__all__ = ["redis_login"]
