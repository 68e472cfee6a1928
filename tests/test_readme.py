"""The README's examples run, one after the other, as a reader would paste them."""

from tests.pages import ROOT, run_page


def test_the_readme_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page(ROOT / "README.md", count=4, longest=9)
    assert (tmp_path / "run").is_dir() and names["state"][1][0].count["w"] == 1
