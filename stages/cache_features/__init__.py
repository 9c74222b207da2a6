"""Optional stage: caches hidden states of an encoder and of the teachers."""

HELP = "Optional: cache hidden states of the texts, for methods that compare texts or states."
EXAMPLES = ("amalgam cache-features", "amalgam cache-features --part 0/4")
