"""The pools of workers, as the distributed tests have them."""

from tests.distributed.conftest import pools

__all__ = ["pools"]
