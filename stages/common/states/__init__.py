"""Cached hidden states of texts."""
