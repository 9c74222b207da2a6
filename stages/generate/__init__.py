"""Generates texts with a language model, steered by the teachers, or by simpler sources."""

HELP = "Generate the training texts. Runs only with a `generate` section."
EXAMPLES = ("amalgam generate", "amalgam generate generate.texts=500 -c no-texts.yaml")
