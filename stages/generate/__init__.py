"""Stage 0, optional: generates texts with a language model, steered by the teachers, or by simpler sources."""

HELP = "Stage 0, optional: generate texts, steered by the teachers. Needs a `generate` section."
EXAMPLES = ("amalgam generate", "amalgam generate generate.texts=500 -c no-texts.yaml")
