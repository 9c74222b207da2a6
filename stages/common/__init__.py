"""Libraries that stages share. Imports no stage."""
