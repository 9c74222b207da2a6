"""Training objectives by name."""
