"""The torch world."""
