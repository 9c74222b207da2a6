"""Stage 0: texts where there are none, written by a language model and steered by the teachers, or by simpler means."""
