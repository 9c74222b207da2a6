"""Runs every teacher on every text once, K times with Monte-Carlo dropout."""

HELP = "Run every teacher on every text, for MUKA also with dropout, and cache the predictions."
EXAMPLES = ("amalgam cache-teachers", "amalgam cache-teachers cache.passes=24", "amalgam cache-teachers --part 0/4")
