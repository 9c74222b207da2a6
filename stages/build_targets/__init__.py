"""Stage 2: builds targets and text weights from the cache with Polars."""

HELP = "Stage 2: build hard or soft targets and weights from the cache. No teacher runs; seconds."
EXAMPLES = ("amalgam build-targets --mode hard", "amalgam build-targets targets.temperature=0.5 --no-upstream")
