"""The experiment file: schema, checks, reading, template."""
