"""What amalgam does: one folder per stage, shared libraries in common/, commands in app/."""
