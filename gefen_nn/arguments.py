"""Kinds of arguments that several commands take; what does not fit is refused with its rule, what came and the fix."""

import argparse
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
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder: got the file {text!r}. Name a folder, new or old.")
    return path


def picture(text: str) -> Path:
    """A file that a picture is written to."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf: got {text!r}. Name such a file.")
    return path
