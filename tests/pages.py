"""The Python blocks of a page of text, run one after the other as a reader would paste them."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_page(path: Path, *, count: int, longest: int) -> dict[str, Any]:
    """Run the `python` blocks of a page in one namespace, and return it.

    Args:
        path: the page.
        count: blocks that it has, so that none is passed over.
        longest: lines that a block may have.
    """
    text = path.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == count
    assert max(len(block.splitlines()) for block in blocks) <= longest
    names: dict[str, Any] = {}
    for block in blocks:
        lines = text[: text.index(block)].count("\n")
        exec(compile("\n" * lines + block, str(path), "exec"), names)  # an error names the page's own line
    return names
