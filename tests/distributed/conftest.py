"""One pool of workers for each world size, for the whole session."""

from collections.abc import Callable, Iterator

import pytest

from gefen_kernels import ops
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """`pools(world)`: the workers of that world size, started when first asked for."""
    ops.warm_up()  # else each worker compiles for itself, at the cost of its first case
    started: dict[int, Pool] = {}

    def pool(world: int) -> Pool:
        if world in started and not started[world].alive:
            started.pop(world).close()
        if world not in started:
            started[world] = Pool(world)
        return started[world]

    yield pool
    for each in started.values():
        each.close()
