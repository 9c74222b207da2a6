"""The demos: with texts, and without."""
