"""Cached logits of the teachers: families, passes, confidence."""
