"""Stage 3: trains the student from cached targets."""
