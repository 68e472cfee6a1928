"""Kinds of arguments that several commands take; what does not fit is refused with its rule, what came and the fix."""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path


class Within:
    """An integer from `least` to `most`."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        """The number that `text` is."""
        if not text.isdecimal() or not self.least <= int(text) <= self.most:
            rule = f"must be an integer from {self.least} to {self.most}"
            raise argparse.ArgumentTypeError(f"{rule}: got {text!r}. Choose another.")
        return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0: got {text!r}. Write it like 1e-3.")
    return value


def folder(text: str) -> Path:
    """A folder, new or old."""
    path = _usable(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder: got the file {text!r}. Name a folder, new or old.")
    return path


def picture(text: str) -> Path:
    """A file that a picture is written to, by a matplotlib that is there: asked before a long command has begun."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf: got {text!r}. Name such a file.")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "needs matplotlib: got none installed. Run `pip install 'gefen-fn[demo]'`, or leave it out."
        )
    return file(text)


def file(text: str) -> Path:
    """A file to write, in a folder that is there."""
    path = _usable(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file: got the folder {text!r}. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder that is there: got {text!r}. Make the folder first.")
    return path


def _usable(text: str) -> Path:
    """A path, new or old, where something can be made."""
    path, came = Path(text), None
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # ValueError of a text that can be no path
        came = getattr(error, "strerror", None) or str(error)
    there = path.absolute()
    if came is None:
        there = next(at for at in (there, *there.parents) if at.exists())
        came = None if os.access(there, os.W_OK) else f"no right to write in {str(there)!r}"
    if came is not None:
        short = text if len(text) < 100 else f"{text[:100]}..."
        rule = "must be a place that you may read and write"
        raise argparse.ArgumentTypeError(f"{rule}: got {came!r} for {short!r}. Choose another.")
    return path
