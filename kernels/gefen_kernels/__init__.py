"""Numeric operations on tensors."""
