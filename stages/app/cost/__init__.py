"""Estimates time, memory and disk of the missing work."""
