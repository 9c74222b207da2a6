"""Optional stage: searches pseudo embeddings for AS-DFD (Ma et al. 2020)."""

HELP = "Optional, as-dfd only: search embeddings that the teachers assign to their classes; no text is used."
EXAMPLES = ("amalgam make-embeddings student.method=as-dfd",)
