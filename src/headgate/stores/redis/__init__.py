"""The store in Redis or Valkey. It needs redis-py: the extra `headgate[redis]`."""

from headgate.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
