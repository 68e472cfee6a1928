"""What the torch side raises, and whose code an error comes from."""

import sysconfig
import traceback
from pathlib import Path


class CheckpointError(ValueError):
    """A state dict that does not fit, or is damaged; nothing was changed."""


class WrongArgumentError(ValueError):
    """An argument of a tool that cannot be meant; the command ends with 2, as for those that its parser refuses."""


def place_of(error: BaseException) -> str | None:
    """File and line of the innermost frame of a user's code; None where an error went through installed code alone."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "<>", error.lineno))
    return next((f"{name}, line {line}" for name, line in reversed(frames) if _is_users(name)), None)


def _is_users(file: str) -> bool:
    here = Path(__file__).resolve().parents[1]
    ours = (here / "gefen_fn", here / "gefen_nn", here / "kernels")
    installed = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not file.startswith("<") and not any(Path(file).resolve().is_relative_to(at) for at in (*ours, *installed))
