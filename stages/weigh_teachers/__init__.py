"""Optional stage: estimates per text which teacher is right, from the cache alone."""
