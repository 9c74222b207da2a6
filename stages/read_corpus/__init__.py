"""Before stage 0: sources are read, checked and keyed once; everything later works from this artifact."""
