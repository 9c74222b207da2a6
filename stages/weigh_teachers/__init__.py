"""Optional stage: estimates per text which teacher is right, from the cache alone."""

HELP = "Optional: estimate every teacher's weight on every text from all texts together."
EXAMPLES = ("amalgam weigh-teachers", "amalgam weigh-teachers student.method=amalgam")
