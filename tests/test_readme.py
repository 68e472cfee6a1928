"""The README's examples run, one after the other, as a reader would paste them."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        assert len(block.splitlines()) <= 9
    names = {}
    exec("\n".join(blocks), names)
    assert (tmp_path / "run").is_dir() and names["state"][1][0].count["w"] == 1
