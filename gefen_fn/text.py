"""Tables as text, which reports print."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines with columns of one width each; all rows are of one length, the first one holds the headings.

    Args:
        rows: of cells.
        left: so many columns, and the last one, begin at their left edge; the others, of numbers, end at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n < left or n == last else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
