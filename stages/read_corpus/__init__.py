"""Reads, checks and keys the texts once."""

HELP = "Read the texts, check them and compute their keys."
EXAMPLES = ("amalgam read-corpus", "amalgam read-corpus corpus.limit=8000 corpus.on_bad_row=skip")
