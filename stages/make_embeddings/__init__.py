"""Optional stage: searches pseudo embeddings for AS-DFD (Ma et al. 2020)."""
