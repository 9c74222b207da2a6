"""Builds targets and text weights from the cache with Polars."""

HELP = "Build hard or soft targets and weights from the cache. No teacher runs; seconds."
EXAMPLES = ("amalgam build-targets --mode hard", "amalgam build-targets targets.temperature=0.5 --no-upstream")
