"""Optional stage: estimates per text which teacher is right, from the cache alone."""

HELP = "Optional: estimate every teacher's weight on every text from all texts together."
EXAMPLES = (
    "amalgam weigh-teachers",
    "amalgam weigh-teachers student.method=amalgam",
)
FALLBACK = "each text's own confidences were used, as muka does"
"""End of a note: the evidence was dropped."""
