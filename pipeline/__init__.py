"""The engine: what to run and where results are stored. Knows no stage and imports no torch."""
