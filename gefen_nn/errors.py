"""What the torch side raises."""


class CheckpointError(ValueError):
    """A state dict that does not fit, or is damaged; nothing was changed."""
