"""The list that the design accepts several processes by: each of its 55 items stands in the name of a test."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ITEMS = range(1, 56)
ON_CARDS = {34: "device/votes.py", 35: "device/votes.py", 54: "device/offload.py"}
"""Items of which a part takes cards, with the file that checks it on them."""


def items_in(name: str) -> set[int]:
    """The numbers that a test's name begins with: 18 and 19 of `test_18_d24_19_what_fails_on_one`."""
    head = re.match(r"test_((?:[a-z]?\d+_)*)", name)
    return {int(word) for word in head.group(1).split("_") if word.isdigit()} if head else set()


@cache
def items_tested() -> set[int]:
    trees = [ast.parse(path.read_text()) for path in sorted(TESTS.rglob("test_*.py"))]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return set().union(*map(items_in, names))


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_is_in_the_name_of_a_test(item):
    assert item in items_tested()


@pytest.mark.parametrize(("item", "file"), ON_CARDS.items(), ids=map(str, ON_CARDS))
def test_what_takes_cards_has_a_section_of_its_own_on_them(item, file):
    assert (TESTS / file).exists()
    assert f'"{Path(file).stem}:' in (TESTS / "device" / "sections.py").read_text()


def test_no_other_number_is_taken_for_an_item():
    assert items_tested() <= set(ITEMS)
