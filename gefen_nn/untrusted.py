"""Folders of torch.distributed.checkpoint that nobody vouches for, read without running what they hold.

Their `.metadata` and each value that is no tensor are pickles, which torch's own reader executes. Here unpicklers that
know a few plain classes read both, before torch's reader, which then finds nothing else in them, reads them again.
"""

import pickle
import warnings
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from gefen_nn.errors import CheckpointError

_RECORDS = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_KNOWN = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _RECORDS if hasattr(metadata, name)},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{(place, f"{kind}Path"): PurePath for place in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: getattr(torch, str(name).removeprefix("torch.")),
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    """Makes what a checkpoint's metadata consists of, and refuses to look up anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name."""
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}, which a checkpoint does not need and may run code")
        return found


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors as `torch.load(weights_only=True)` does, which runs no code."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Put a value in its place, if it is plain."""
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            raise CheckpointError(f"`{name}` names what a checkpoint does not need and may run code") from error
        value.seek(0)
        super().load_bytes(read_item, value)


def read_metadata(folder: Path) -> metadata.Metadata:
    """What a folder's `.metadata` says.

    Raises:
        CheckpointError: if it is damaged, holds what may run code, or names files out of the folder.
    """
    file = folder / ".metadata"
    try:
        with file.open("rb") as stream:
            held = _Unpickler(stream).load()
        paths = [str(x.relative_path) for x in held.storage_data.values()]
        sizes = [torch.Size(x.size) for x in held.state_dict_metadata.values() if hasattr(x, "size")]
    except OSError:
        raise
    except Exception as error:  # a pickle that is damaged may raise anything
        raise _refused(file, repr(error)) from error
    stray = [name for name in paths if Path(name).name != name]
    if not isinstance(held, metadata.Metadata) or stray or any(n < 0 for size in sizes for n in size):
        raise _refused(file, f"files {stray[:3]}" if stray else f"a {type(held).__name__} of sizes {sizes[:3]}")
    return held


def _refused(file: Path, came: str) -> CheckpointError:
    return CheckpointError(
        f"`.metadata` must be as torch.distributed.checkpoint wrote it, and name nothing but plain classes and the "
        f"folder's own files: got {came} in {str(file)!r}. The file is damaged, or not to be trusted."
    )


def loaded(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill `wanted`, by flat keys, from a folder whose metadata was read.

    Raises:
        CheckpointError: if files are missing or damaged, or hold what may run code.
    """
    try:
        with warnings.catch_warnings():  # one process needs no group, and no warning that it has none
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(wanted, checkpoint_id=folder, planner=_Planner())
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        came = str(cause) if isinstance(cause, CheckpointError) else repr(cause)
        raise CheckpointError(
            f"The folder's files must be complete, and hold tensors and plain values: got {came}. Load an older one."
        ) from error
    return wanted
