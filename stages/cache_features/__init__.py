"""Optional stage: caches hidden states of an encoder and of the teachers."""
