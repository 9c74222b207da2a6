"""Measures amalgam and its rivals by one protocol."""
