"""What the torch side raises."""


class CheckpointError(ValueError):
    """A state dict that does not fit, or is damaged; nothing was changed."""


class GroupFailure(RuntimeError):
    """Another member of the process group failed, so that this one stopped before it changed anything."""
