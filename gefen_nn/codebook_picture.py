"""The picture of codebooks: where the levels lie, and how often codes use them."""

from pathlib import Path

from gefen_nn.console import new_figure
from gefen_nn.inspecting import Contents

_BLUE = "#0072b2"


def draw(contents: Contents, path: Path) -> None:
    """Write the picture, a row per codebook.

    Args:
        contents: of a checkpoint with codebooks.
        path: a file whose suffix says the format.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is no codebook.
    """
    if not contents.codebooks:
        raise ValueError("A picture needs a codebook: got a checkpoint without one. Leave --plot out.")
    figure = new_figure(10, 3.2 * len(contents.codebooks))
    for n, (stage, book) in enumerate(contents.codebooks.items()):
        left, right = (figure.add_subplot(len(contents.codebooks), 2, 2 * n + k) for k in (1, 2))
        left.step(range(len(book.levels)), book.levels, where="mid", color=_BLUE)
        left.set_title(f"Levels of {stage or 'the codebook'} by code", loc="left", fontsize=10)
        left.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
        right.bar(range(len(book.used)), book.used, width=1.0, color=_BLUE)
        right.set_title(f"{sum(book.used):,} codes; {book.dead} levels unused", loc="left", fontsize=10)
        for axes in (left, right):
            axes.set_xlabel("code")
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
