"""Stage 3: the student learns the cached targets. It never sees a teacher."""
