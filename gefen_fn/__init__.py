"""Functional optimizer transforms."""
