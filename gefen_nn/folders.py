"""Checkpoint folders: written beside their place, checked by a list of their files, and put there when complete.

The list, `manifest.json`, is the last file to be written, so a folder that has one is complete. A process may be killed
between any two calls of the file system: what `published` finds afterwards is the last checkpoint that was complete.
"""

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from gefen_nn.errors import CheckpointError

_MANIFEST = "manifest.json"
_VERSION = 1
_CHUNK = 1 << 20

Sums = dict[str, tuple[int, int]]  # size and CRC-32 of each file


def beside(path: Path, what: str) -> Path:
    """Where a checkpoint is written (`part`), or waits to be deleted (`old`)."""
    path = Path(os.path.abspath(path))  # "." has no name
    return path.parent / f".{path.name}.{what}"  # which "/" has too


def is_complete(folder: Path) -> bool:
    """Whether all of a checkpoint was written there."""
    return (folder / _MANIFEST).is_file()


def check_place(path: Path) -> None:
    """Refuse to write where something lies that is no checkpoint, or where no folder can be made.

    Raises:
        CheckpointError: naming the path.
    """
    try:
        _check_writable(path)
    except (OSError, ValueError) as error:  # ValueError of a text that can be no path
        raise CheckpointError(failure(path, repr(error))) from error
    if path.exists() and not is_complete(path):
        raise CheckpointError(
            f"`path` must be new, or an older checkpoint: got {str(path)!r}, which has no {_MANIFEST}. "
            "Choose another, or take that away."
        )


def failure(path: Path, came: str) -> str:
    """What an error says where the disk does not do what is asked of it."""
    return (
        f"`path` must lie where all processes may write and read: got {came} for {str(path)!r}. Choose another folder, "
        "or free space and rights there."
    )


def _check_writable(path: Path) -> None:
    """Raise `OSError` or `ValueError` where a folder cannot be made beside a path."""
    for name in (path, beside(path, "part")):
        with contextlib.suppress(FileNotFoundError):
            name.stat()
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "a link to nothing", str(path))


def prepare(path: Path) -> Path:
    """An empty folder to write to, without what a killed process left in it."""
    part = beside(path, "part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def sums(folder: Path, pattern: str = "*") -> Sums:
    """Sizes and checksums of a folder's files."""
    return {file.name: _sum(file) for file in sorted(folder.glob(pattern))}


def _sum(file: Path) -> tuple[int, int]:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return file.stat().st_size, crc


def write(file: Path, content: bytes) -> None:
    """Write a file so that it is on the disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def publish(part: Path, path: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Complete a folder and put it in its place; an older checkpoint there stays until the new one is whole."""
    write(part / "manifest.tmp", json.dumps({"format_version": _VERSION, "files": files}).encode())
    (part / "manifest.tmp").rename(part / _MANIFEST)
    _sync(part)
    old = beside(path, "old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    part.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have the names in a folder reach the disk, where the system lets one ask for it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def published(path: Path) -> Path:
    """Where the checkpoint of a path lies: there, or beside it, if a process was killed while it put it there.

    Raises:
        CheckpointError: if there is none.
    """
    for folder in (path, beside(path, "old")):
        if is_complete(folder):
            return folder
    if (path / ".metadata").is_file() and not (path / "extra.pt").exists():
        raise CheckpointError(
            f"`path` must be a checkpoint that `gefen_nn.save` wrote: got one of torch.distributed.checkpoint at "
            f"{str(path)!r}. Load it by `dcp.load`, with `gefen_nn.OptimizerState` under the name it was saved by."
        )
    came = "no complete one" if path.exists() else "nothing"
    raise CheckpointError(
        f"`path` must be a checkpoint that `gefen_nn.save` wrote: got {came} at {str(path)!r}. Load another."
    )


def check_files(folder: Path, rank: int, processes: int) -> None:
    """Refuse a checkpoint with a file that is not as it was written; each process reads its share of them.

    Raises:
        CheckpointError: naming the first file that is missing or damaged.
    """
    for i, (name, wanted) in enumerate(_listed(folder).items()):
        if i % processes != rank:
            continue
        file = folder / name
        came = _sum(file) if file.is_file() else None
        if came != tuple(wanted):
            what = "nothing" if came is None else f"{came[0]} bytes with checksum {came[1]:08x}"
            raise CheckpointError(
                f"`{name}` must be as it was written, {wanted[0]} bytes with checksum {wanted[1]:08x}: got {what}. "
                "The file is damaged; load an older checkpoint."
            )


def _listed(folder: Path) -> Sums:
    try:
        whole = json.loads((folder / _MANIFEST).read_text())
        version, files = whole["format_version"], whole["files"]
        listed = {str(name): (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"`{_MANIFEST}` must list the files: got {error}. Load an older checkpoint.") from error
    if missing := {".metadata", "extra.pt"} - listed.keys():
        raise CheckpointError(
            f"`{_MANIFEST}` must list all files: got none of {sorted(missing)}. Load an older checkpoint."
        )
    if version != _VERSION:
        raise CheckpointError(f"`format_version` must be {_VERSION}: got {version}. Update the package.")
    return listed
