"""Stage weigh-teachers: estimates per text which teacher is right, from the cache."""

HELP = "Estimate every teacher's weight on every text from all texts together. Runs for `amalgam`."
EXAMPLES = ("amalgam weigh-teachers", "amalgam weigh-teachers student.method=amalgam")
