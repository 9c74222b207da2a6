"""A teacher at inference, with dropout off or keyed."""
