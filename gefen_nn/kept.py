"""What the steps of an optimizer replace, and whether one of them failed when it had begun to write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gefen_fn.base import OptState
from gefen_fn.fuse import FusedStep, Step


class Kept:
    """An object of its own, as torch.compile forgets what is assigned to an optimizer.

    Attributes:
        state: the transform's.
        seen: what it was made for, by parameter.
        skipped: whether the last step found no gradient, or left one that overflowed out.
        half_done: what failed while it wrote, and left neither the old nor the new; empty if nothing did.
        along: what a load is to write together with its own; None for nothing.
    """

    def __init__(self) -> None:
        self.state: OptState = None
        self.seen: dict[str, tuple[Any, ...]] = {}
        self.skipped = False
        self.half_done = ""
        self.along: Callable[[], Any] | None = None

    def check_whole(self) -> None:
        """Refuse to go on with what a failure left half-written.

        Raises:
            RuntimeError: naming what failed.
        """
        if self.half_done:
            raise RuntimeError(
                "Parameters and state must be of one moment: got some from before and some from after a "
                f"`{self.half_done}` that failed while it wrote. Load a checkpoint of the model and the optimizer, or "
                "build both anew."
            )

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Remember `what` as half-done if anything inside fails."""
        try:
            yield
        except BaseException:  # an interrupt leaves as much behind as an error
            self.half_done = what
            raise

    @contextmanager
    def loading(self, along: Callable[[], Any]) -> Iterator[None]:
        """Inside of it a load also does `along`, once nothing can be refused any more: as one write with its own."""
        self.along = along
        try:
            yield
        finally:
            self.along = None

    @contextmanager
    def stepping(self, step: FusedStep) -> Iterator[None]:
        """Remember a step as half-done if it fails after its first write."""
        inner = _innermost(step)
        inner.wrote = False
        try:
            yield
        except BaseException:  # as above
            self.half_done = "step" if inner.wrote else self.half_done
            raise


def _innermost(step: FusedStep) -> Step:
    return step if isinstance(step, Step) else _innermost(step.inner)
