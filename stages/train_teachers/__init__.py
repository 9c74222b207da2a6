"""Optional stage: fine-tunes teachers from labelled texts."""
