"""Measures teachers, ensemble and student on labelled test texts, and writes the report."""

HELP = "Evaluate the student and every teacher: a table here, and one HTML page in reports/."
EXAMPLES = (
    "amalgam report",
    "amalgam report report.calibration_bins=10",
    "amalgam report --fail-under 0.8 --fail-if-worse-than ensemble",
)
