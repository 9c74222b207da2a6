"""Searches pseudo embeddings for AS-DFD (Ma et al. 2020)."""

HELP = "Search embeddings that the teachers assign to their classes; no text is used. Runs for as-dfd only."
EXAMPLES = ("amalgam make-embeddings student.method=as-dfd",)
