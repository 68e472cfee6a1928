"""Sharded leaves: which part of a leaf is held here, and tensors as DTensors and back.

A DTensor is computed on as the plain tensor of its own part; what that part must know of the whole is a `Piece`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)  # each is made once, and thousands of boxes take long to compare
class Peers:
    """The members that hold a leaf between them, as far as it is cut along some axes.

    Attributes:
        boxes: the `(first, last + 1)` of each axis of each member's part, by its place in the group.
        own: this member's place in the group.
        group: the process group; members of it that are no peers have no box.
    """

    boxes: Mapping[int, tuple[tuple[int, int], ...]]
    own: int
    group: Any


@dataclass(frozen=True)
class Piece:
    """The part of a leaf that is held here.

    Attributes:
        shape: of the part.
        whole: shape of the leaf.
        offset: the leaf's index of the part's first entry.
        axes: the axes that are cut.
        mesh: of the DTensor; None for a whole leaf.
        placements: of the DTensor.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    axes: frozenset[int] = frozenset()
    mesh: Any = None
    placements: tuple[Any, ...] = ()

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> "Piece":
        """The piece that is all of a leaf."""
        return cls(tuple(shape), tuple(shape), (0,) * len(shape))

    def edges(self, axis: int) -> frozenset[int]:
        """Where the parts of all members end along an axis, the end of the leaf left out."""
        return _edges(self, axis) if axis in self.axes else frozenset()

    def peers(self, axes: frozenset[int]) -> Peers | None:
        """Who holds the other parts along these axes; None if none of them is cut, or the leaf lives elsewhere."""
        if not axes & self.axes or self.mesh.get_coordinate() is None:
            return None
        return _peers(self.whole, self.mesh, self.placements, axes & self.axes)


@functools.lru_cache(maxsize=4096)
def _edges(piece: Piece, axis: int) -> frozenset[int]:
    """`Piece.edges`, kept because there may be thousands of members, and each step of the pure path asks."""
    peers = piece.peers(frozenset((axis,)))
    ends = () if peers is None else (box[axis][1] for box in peers.boxes.values())
    return frozenset(ends) - {piece.whole[axis], 0}


PLAIN = (Tensor, torch.nn.Parameter)
"""What most leaves are; asked first, as it is asked of every leaf at every step."""


def is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor; asked without importing them."""
    return type(x) not in PLAIN and isinstance(x, Tensor) and hasattr(x, "device_mesh")


def local(x: Any) -> Any:
    """The plain tensor of this member's part, also inside a NamedTuple; anything but a DTensor as it is."""
    if type(x) in PLAIN:
        return x
    if _is_record(x):
        return type(x)(*map(local, x))
    return _part_of(x) if is_sharded(x) else x


def _part_of(x: Any) -> Tensor:
    part: Tensor = x.to_local()
    return part if part.dim() == x.dim() else part.reshape(0, *x.shape[1:])  # torch's empty part of another mesh


def piece_of(x: Tensor) -> Piece:
    """Where the part of `x` that is held here lies."""
    if not is_sharded(x):
        return Piece.all_of(x.shape)
    mesh = x.device_mesh  # type: ignore[attr-defined]  # a DTensor
    return _piece(tuple(x.shape), mesh, placements_of(x), mesh.get_rank())


@functools.lru_cache(maxsize=4096)
def _piece(whole: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], rank: int) -> Piece:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Piece((0, *whole[1:]), whole, (0,) * len(whole), _cut(mesh, placements), mesh, placements)
    shape, offset = _part(whole, mesh, placements, coordinate)
    return Piece(shape, whole, offset, _cut(mesh, placements), mesh, placements)


def _cut(mesh: Any, placements: tuple[Any, ...]) -> frozenset[int]:
    return frozenset(p.dim for size, p in zip(mesh.shape, placements, strict=True) if size > 1 and not p.is_replicate())


def _part(
    whole: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], at: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of the part at a coordinate of the mesh, by DTensor's own rule."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute

    shape, offset = compute(whole, tuple(mesh.shape), list(at), placements)
    return tuple(shape), tuple(offset)


def parts_of(whole: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> dict[int, Any]:
    """Shape and offset of the part that each member of a mesh holds, by rank."""
    at = itertools.product(*map(range, mesh.shape))
    return {int(mesh.mesh[place]): _part(whole, mesh, placements, place) for place in at}


@functools.lru_cache(maxsize=4096)
def _peers(whole: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], axes: frozenset[int]) -> Peers:
    over = [d for d, p in enumerate(placements) if not p.is_replicate() and p.dim in axes and mesh.shape[d] > 1]
    group, coordinate = mesh_group(mesh, over), list(mesh.get_coordinate())
    members = dist.get_process_group_ranks(group)
    boxes = {}
    for at in itertools.product(*(range(mesh.shape[d]) for d in over)):
        for d, i in zip(over, at, strict=True):
            coordinate[d] = i
        shape, offset = _part(whole, mesh, placements, coordinate)
        box = tuple((first, first + length) for first, length in zip(offset, shape, strict=True))
        boxes[members.index(int(mesh.mesh[tuple(coordinate)]))] = box
    return Peers(boxes, members.index(dist.get_rank()), group)


def mesh_group(mesh: Any, over: Sequence[int]) -> Any:
    """A process group of the members that differ from this one in these axes of the mesh, and perhaps of more.

    One that does not exist yet is made, which is a collective; so `init` asks for it first, see `agree.make_groups`.
    """
    if len(over) == 1:
        return mesh.get_group(over[0])
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten().get_group()


def like_piece(x: Tensor, of: Tensor) -> Tensor:
    """`x` as the part of a DTensor that `of` is, if it is one."""
    return wrap(x, of, tuple(of.shape)) if is_sharded(of) else x


def wrap(x: Tensor, like: Tensor, whole: Sequence[int]) -> Tensor:
    """`x` as the part of a DTensor of shape `whole`, placed as the DTensor `like`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]  # a DTensor
    stride = torch.empty(tuple(whole), device="meta").stride()
    if x.device.type not in (mesh.device_type, "meta"):
        return _offloaded(x, like, torch.Size(whole), stride)
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride)


def _offloaded(x: Tensor, like: Tensor, whole: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A DTensor whose part stays on another device than its mesh's, where `from_local` would move it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]  # a DTensor
    form = TensorMeta(whole, stride, x.dtype)
    return DTensor(x.detach(), DTensorSpec(mesh, placements, tensor_meta=form), requires_grad=False)  # type: ignore[no-untyped-call]


def zeros_placed(like: Tensor, whole: Sequence[int], dtype: torch.dtype = torch.float32, fill: int = 0) -> Tensor:
    """A contiguous tensor of shape `whole` full of `fill`; if `like` is a DTensor its part, placed as `like` is.

    An axis that is cut has the meaning of `like`'s axis of that number, and is cut where that one is.
    """
    part = local(like).new_full(placed_shape(like, whole), fill, dtype=dtype, requires_grad=False)
    return wrap(part, like, whole) if is_sharded(like) else part


def placed_shape(like: Tensor, whole: Sequence[int]) -> tuple[int, ...]:
    """The shape of the part held here of a tensor of shape `whole` placed as `like`; all of a 0-dim one."""
    if not is_sharded(like) or not whole:
        return tuple(whole)
    mesh = like.device_mesh  # type: ignore[attr-defined]  # a DTensor
    return _piece(tuple(whole), mesh, placements_of(like), mesh.get_rank()).shape


def on_pieces(f: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`f` of plain tensors for rows that may hold DTensors; each result is placed as the argument in its place.

    An argument may be a NamedTuple of tensors, its result then one of the same form.
    """

    def call(*row: Any) -> tuple[Any, ...]:
        if not is_sharded(row[0]):
            return f(*row)
        return tuple(placed(new, old) for new, old in zip(f(*map(local, row)), row, strict=False))

    return call


def placements_of(x: Tensor) -> tuple[Any, ...]:
    """How a DTensor lies on its mesh; `()` for a whole tensor."""
    return tuple(x.placements) if is_sharded(x) else ()  # type: ignore[attr-defined]  # a DTensor


def placed(new: Any, old: Any) -> Any:
    """What was computed from the part of a DTensor as a DTensor placed as that one, also inside a NamedTuple."""
    if _is_record(old):
        return type(old)(*map(placed, new, old))
    return like_piece(new, old) if isinstance(new, Tensor) else new


def _is_record(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")
