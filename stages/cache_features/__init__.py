"""Caches hidden states of an encoder and of the teachers."""

HELP = "Cache hidden states of the texts. Runs for `amalgam` and other methods that compare texts or states."
EXAMPLES = ("amalgam cache-features", "amalgam cache-features --part 0/4")
