"""Stage 1: runs every teacher on every text once, K times with Monte-Carlo dropout."""
