"""Reads, checks and keys the texts once."""
