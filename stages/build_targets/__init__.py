"""Stage 2: builds targets and text weights from the cache with Polars."""
