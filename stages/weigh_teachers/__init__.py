"""Which teacher is the right one, text by text, from the cache alone."""
