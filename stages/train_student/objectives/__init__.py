"""What a student minimises: a few lines or a small module each, by the name that the experiment gives."""
