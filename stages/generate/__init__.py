"""Stage 0, optional: generates texts with a language model, steered by the teachers, or by simpler sources."""
