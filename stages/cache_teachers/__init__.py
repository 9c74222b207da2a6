"""Stage 1: runs every teacher on every text once, K times with Monte-Carlo dropout."""

HELP = "Stage 1: run every teacher on every text, K passes with dropout, and cache the predictions."
EXAMPLES = ("amalgam cache-teachers", "amalgam cache-teachers cache.passes=24", "amalgam cache-teachers --part 0/4")
