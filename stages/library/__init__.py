"""amalgam as a library: what `from amalgam import Experiment` gives."""
