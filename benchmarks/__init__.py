"""What amalgam costs beside its rivals, by one protocol."""
