"""The machinery: what may be said, what is identical, what is stored, what is current, and how the rest is run."""
