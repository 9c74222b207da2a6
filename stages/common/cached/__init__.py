"""Cached predictions and hidden states of texts, by key."""
