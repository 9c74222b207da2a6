"""Fits Gaussians to each teacher's states, to measure how far a text is from them."""

HELP = "Fit statistics of each teacher's own texts, to score texts of other domains. Runs for methods that read them."
EXAMPLES = ("amalgam fit-statistics", "amalgam fit-statistics targets.uncertainty=rmd")
