"""Stage guess-embeddings: what stands in the place of texts for AS-DFD (Ma et al. 2020)."""
