"""What the torch side raises."""


class CheckpointError(ValueError):
    """A state dict that does not fit, or is damaged; nothing was changed."""


class WrongArgumentError(ValueError):
    """An argument of a tool that cannot be meant; the command ends with 2, as for those that its parser refuses."""
