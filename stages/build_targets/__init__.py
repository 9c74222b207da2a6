"""Stage 2: from the cache to what the student is to learn. Polars alone; no teacher is in sight."""
