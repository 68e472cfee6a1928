"""What commands show: bars on the error stream, so that standard output stays machine-readable, and pictures."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

from torch import Tensor

Watch = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows work under a label, of so many parts; inside, what is given is called after each part."""


@contextmanager
def silent(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show nothing."""
    yield lambda: None


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on the error stream; nothing where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def aside() -> AbstractContextManager[Any]:
    """Within it what is printed goes to the error stream: a user's modules print there, not amid a command's answer."""
    return redirect_stdout(sys.stderr)


def as_json(value: Any, indent: int | None = None) -> str:
    """A command's answer as JSON; it has no number that is not finite, so null stands for one."""
    return json.dumps(plain(value), indent=indent, allow_nan=False, default=str)


def plain(value: Any) -> Any:
    """Lists, dictionaries and numbers as JSON has them: None for a number that is not finite, and for a meta tensor."""
    if isinstance(value, Tensor):
        return None if value.is_meta else plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def size(number: float) -> str:
    """Bytes with a unit of a thousand, a million or a thousand million."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:,.3f} {unit}"
    return f"{number:,.0f} B"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, in inches.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures are drawn by matplotlib: {error}. Run `pip install 'gefen-fn[demo]'`.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
