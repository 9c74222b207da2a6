"""Stage 1: every teacher is asked about every text once, K times with Monte-Carlo dropout, and the answers are kept."""
