"""What the commands and `from amalgam import Experiment` do; above all stages."""
