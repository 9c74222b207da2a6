"""The engine: what to run and where results are stored. It imports no stage and no torch."""
