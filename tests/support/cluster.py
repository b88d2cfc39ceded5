"""A cluster for tests that aren't about its failing."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.valkey import PATIENCE, ValkeyServer, cluster, is_whole, wait_for


@contextmanager
def steady_cluster() -> Iterator[list[ValkeyServer]]:
    """A cluster whose nodes don't take each other for dead when the machine has stood still for a while."""
    with cluster() as nodes:
        for node in nodes:
            with node.client() as client:
                client.config_set("cluster-node-timeout", round(PATIENCE * 1000))
        for node in nodes:
            wait_for(lambda node=node: is_whole(node, len(nodes)), "the cluster")  # type: ignore[misc]
        yield nodes
