"""Compares the teachers from the cache alone, without labels."""
