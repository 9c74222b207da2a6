"""The report: what the labelled test part says of every teacher, of their ensemble and of the student."""
