"""Optional stage: fits Gaussians to each teacher's states, to measure how far a text is from them."""

HELP = "Optional: fit statistics of each teacher's own texts, to score out-of-domain texts."
EXAMPLES = ("amalgam fit-statistics", "amalgam fit-statistics targets.uncertainty=rmd")
