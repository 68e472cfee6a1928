"""The shape of the house: who may import whom, what is public, and how long a function may be."""

import ast
import doctest
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

import gefen_fn
import gefen_nn
from gefen_nn import cli

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "gefen_kernels": ROOT / "kernels" / "gefen_kernels",
    "gefen_fn": ROOT / "gefen_fn",
    "gefen_nn": ROOT / "gefen_nn",
}
MAY_IMPORT = {
    "gefen_kernels": {"gefen_kernels"},
    "gefen_fn": {"gefen_kernels", "gefen_fn"},
    "gefen_nn": {"gefen_kernels", "gefen_fn", "gefen_nn"},
}
SOURCES = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.glob("*.py"))]
WITHOUT_EXAMPLE = {
    "Scope": "needs a process group; notebooks/processes.md has one",
    "Step": "called by gefen_nn alone",
}
LONGEST_FUNCTION = 60
LONGEST_FILE = 400


def imported(path: Path) -> list[str]:
    """Full names of the modules a file imports, wherever in the file the import stands."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def own_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring and its inner functions, which are counted for themselves."""
    inner = [node for node in function.body if isinstance(node, ast.FunctionDef)]
    text = function.body[:1] if ast.get_docstring(function) else []
    return function.end_lineno - function.lineno + 1 - sum(n.end_lineno - n.lineno + 1 for n in inner + text)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


source = pytest.mark.parametrize(("package", "path"), SOURCES, ids=[f"{p}/{f.name}" for p, f in SOURCES])


@source
def test_imports_point_one_way(package, path):
    ours = {name.split(".")[0] for name in imported(path)} & set(PACKAGES)
    assert ours <= MAY_IMPORT[package]


@source
def test_optree_is_known_to_one_file(package, path):
    if path != PACKAGES["gefen_fn"] / "tree.py":
        assert not any(name.split(".")[0] == "optree" for name in imported(path))


@source
def test_kernels_know_no_torch_distributed_and_no_torch_optim(package, path):
    forbidden = ("torch.distributed", "torch.optim") if package == "gefen_kernels" else ("torch.optim.",)
    if package != "gefen_nn":
        assert not any(name.startswith(forbidden) for name in imported(path))


@source
def test_functions_and_files_stay_short(package, path):
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    long = {f.name: own_lines(f) for f in functions(path) if own_lines(f) > LONGEST_FUNCTION}
    assert not long


@source
def test_a_leading_underscore_means_this_file_only(package, path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            assert not [alias.name for alias in node.names if alias.name.startswith("_")]


def test_the_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves_and_is_typed(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    assert (PACKAGES[package] / "py.typed").exists()


@pytest.mark.parametrize("module", [gefen_fn, gefen_nn], ids=lambda module: module.__name__)
def test_the_overview_runs_and_names_what_is_public(module):
    tree = {"w": torch.ones(64, 72)}
    names = {"params": tree, "grads": tree, "model": torch.nn.Linear(72, 64)}
    failed, tried = doctest.testmod(module, extraglobs=names)
    assert tried and not failed
    functions = [name for name in module.__all__ if name.islower() or module is gefen_nn]
    assert [name for name in functions if f"`{name}`" not in module.__doc__] == []
    assert len(module.__doc__.splitlines()) <= 40


def is_called(x):
    """Whether a public name is a function or class that users call: named tuples and errors come from others."""
    is_ours = getattr(x, "__module__", "").startswith("gefen")
    return is_ours and (inspect.isfunction(x) or (inspect.isclass(x) and not issubclass(x, (tuple, Exception))))


def test_what_users_call_has_an_example():
    named = {name: getattr(module, name) for module in (gefen_fn, gefen_nn) for name in module.__all__}
    without = [name for name, x in named.items() if is_called(x) and "\nExample:\n" not in inspect.getdoc(x)]
    assert sorted(without) == sorted(WITHOUT_EXAMPLE)


def test_the_version_is_told_by_both_packages_and_the_command(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gefen {gefen_fn.__version__}\n"
    assert gefen_nn.__version__ == gefen_fn.__version__
