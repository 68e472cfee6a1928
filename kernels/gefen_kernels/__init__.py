"""Numeric operations on tensors: codes and scales, codebooks, block lengths. Knows no trees."""

from gefen_kernels.block_search import find_block
from gefen_kernels.codebook import default_codebook, learn_codebook

__all__ = ["default_codebook", "find_block", "learn_codebook"]
