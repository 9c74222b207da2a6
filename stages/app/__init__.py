"""The commands and `from amalgam import Experiment`; above all stages."""
