"""The wheel and the source archive: built, installed where nothing of ours is, imported beside `kernels`, and used."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import gefen_fn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PACKAGES = ("gefen_fn", "gefen_kernels", "gefen_nn")
# Run in the new environment, from a folder that holds nothing.
USE = """
import importlib.metadata
from pathlib import Path

import gefen_fn
import gefen_kernels
import gefen_nn
import kernels
import torch

site = Path(gefen_fn.__file__).parent.parent
for package in (gefen_fn, gefen_kernels, gefen_nn):
    assert Path(package.__file__).is_relative_to(site) and Path(package.__file__).with_name("py.typed").exists()
owners = importlib.metadata.packages_distributions()
assert owners["kernels"] == ["kernels"] and callable(kernels.get_kernel), owners["kernels"]
assert set(owners["gefen_kernels"]) == {"gefen-fn"}, owners["gefen_kernels"]
model = torch.nn.Linear(96, 64)
before = model.weight.detach().clone()
optimizer = gefen_nn.Gefen(model.named_parameters(), lr=1e-3, fused=False)
model(torch.ones(4, 96)).square().mean().backward()
optimizer.step()
assert not torch.equal(model.weight, before) and model.weight.isfinite().all()
assert optimizer.state[model.weight]["scale_by_gefen.mu.codes"].dtype == torch.uint8
print(site)
"""


def run(*command, cwd=None):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of both archives; the wheel is built from what the source archive holds."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """An environment with the wheel and `kernels`, that takes torch and the like from this one."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *built.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "kernels")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A line of a .pth file is a place to import from; the .pth files there, ours among them, are not read.
    (site / "this_one.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_wheel_holds_three_typed_packages_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"gefen_fn-{gefen_fn.__version__}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_source_archive_holds_what_the_tests_need(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[-1] for name in tar.getnames()}
    needed = {"tests/test_wheel.py", "tests/distributed/pool.py", "notebooks/index.md", "Makefile", "constraints.txt"}
    assert needed | {"kernels/gefen_kernels/py.typed", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert not [name for name in names if name.startswith((".venv", "site/", "demo-out"))]


def test_the_wheel_steps_beside_the_kernels_package(clean, tmp_path):
    site = run(clean, "-W", "error", "-c", USE, cwd=tmp_path)
    assert Path(site).is_relative_to(clean.parent.parent)


def test_the_wheel_brings_the_command(clean, tmp_path):
    assert run(clean.parent / "gefen", "--version", cwd=tmp_path) == f"gefen {gefen_fn.__version__}"
