"""Batched products of matrices as one rounding each, and what they cost where the result is known to be symmetric.

A back end may have a kernel that computes the tiles of one triangle and mirrors them: about half the flops.
"""

import torch
from torch import Tensor

from gefen_kernels.ops import back_end

# Side of an output tile of the kernels for symmetric products.
TILES = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64}


def gram(x: Tensor, *, tile: int | None = None) -> Tensor:
    """`X X^T` of each matrix `[N, R, C]`: `[N, R, R]` of the dtype of x, added up in fp32; `tile` as for `product`."""
    return _call(x, x.mT, None, 1.0, 1.0, tile)


def product(
    a: Tensor, b: Tensor, added: Tensor, *, beta: float = 1.0, alpha: float = 1.0, tile: int | None = None
) -> Tensor:
    """`alpha a b + beta added`, added up in fp32 and rounded once; the same bits under `vmap` and `compile`.

    Args:
        a: `[N, R, K]`.
        b: `[N, K, C]`.
        added: `[N, R, C]`.
        beta: factor of `added`.
        alpha: factor of the product.
        tile: `tile_side` of this device, if a, b and `added` are polynomials of one symmetric matrix, so that the
            result is symmetric too: the kernel for such products is taken where it costs less. None: it is not.

    Returns:
        `[N, R, C]` of the dtype of a.
    """
    return _call(a, b, added, beta, alpha, tile)


def tile_side(device: torch.device, dtype: torch.dtype) -> int | None:
    """Side of the output tiles of a device's kernel for symmetric products; None where there is none."""
    return TILES.get(dtype) if _has_kernel(device.type) else None


def symmetric_flops(rows: int, depth: int, tile: int | None) -> int:
    """Flops of a symmetric `[rows, rows]` product over `depth`: whole tiles of one triangle, or all entries if less."""
    full = 2 * rows * rows * depth
    if tile is None:
        return full
    side = -(-rows // tile)
    return min(full, side * (side + 1) * tile * tile * depth)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not type it
def _has_kernel(kind: str) -> bool:
    return hasattr(back_end(torch.device(kind)), "symmetric_product")


def _call(a: Tensor, b: Tensor, added: Tensor | None, beta: float, alpha: float, tile: int | None) -> Tensor:
    if a.requires_grad:  # the operator has no derivative
        return _by_torch(a, b, added, beta, alpha)
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(a):
        result: Tensor = torch.ops.gefen_kernels.multiply.default(a, b, added, beta, alpha, tile)
        return result
    return _multiply(a, b, added, beta, alpha, tile)  # some microseconds less


def _multiply(a: Tensor, b: Tensor, added: Tensor | None, beta: float, alpha: float, tile: int | None) -> Tensor:
    rows, depth = a.shape[-2:]
    if tile is None or symmetric_flops(rows, depth, tile) == symmetric_flops(rows, depth, None):
        return _by_torch(a, b, added, beta, alpha)
    transposed = b.mT if added is None else b  # what is no transpose of a is symmetric
    result: Tensor = back_end(a.device).symmetric_product(a, transposed, added, beta=beta, alpha=alpha)  # type: ignore[union-attr]  # there is one: it has tiles
    return result


def _by_torch(a: Tensor, b: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    if a.dtype == torch.float16 and a.device.type == "cpu":  # torch's own fp16 products run at 1 GF/s there
        a, b, added = a.to(torch.float32), b.to(torch.float32), None if added is None else added.to(torch.float32)
        return _by_torch(a, b, added, beta, alpha).to(torch.float16)
    return torch.bmm(a, b) if added is None else torch.baddbmm(added, a, b, beta=beta, alpha=alpha)


def _shape_of_multiply(
    a: Tensor, b: Tensor, added: Tensor | None, beta: float, alpha: float, tile: int | None
) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _mapped_multiply(
    info: object,
    in_dims: tuple[int | None, ...],
    a: Tensor,
    b: Tensor,
    added: Tensor | None,
    beta: float,
    alpha: float,
    tile: int | None,
) -> tuple[Tensor, int]:
    """A mapped axis joins the batch."""
    size: int = info.batch_size  # type: ignore[attr-defined]  # torch gives its type no public name

    def joined(x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    kept = None if added is None else joined(added, in_dims[2])
    result = _call(joined(a, in_dims[0]), joined(b, in_dims[1]), kept, beta, alpha, tile)
    return torch.unflatten(result, 0, (size, len(result) // size)), 0


# An operator, because `vmap` and `compile` take `baddbmm` apart and round in between.
# torch types no method of a Library.
_LIBRARY = torch.library.Library("gefen_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("multiply(Tensor a, Tensor b, Tensor? added, float beta, float alpha, int? tile) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("multiply", _multiply, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("gefen_kernels::multiply", _shape_of_multiply, lib=_LIBRARY)
torch.library.register_vmap("gefen_kernels::multiply", _mapped_multiply, lib=_LIBRARY)
