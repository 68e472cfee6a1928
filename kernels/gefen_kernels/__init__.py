"""Numeric operations on tensors: codes and scales, codebooks, block lengths, orthogonal factors. Knows no trees."""

from gefen_kernels.block_search import find_block
from gefen_kernels.codebook import default_codebook, learn_codebook
from gefen_kernels.newton_schulz import orthogonalize
from gefen_kernels.ns_coefficients import NS_COEFFS, ns_coefficients

__all__ = ["NS_COEFFS", "default_codebook", "find_block", "learn_codebook", "ns_coefficients", "orthogonalize"]
