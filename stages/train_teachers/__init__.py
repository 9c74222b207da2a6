"""Optional stage: fine-tunes teachers from labelled texts."""

HELP = "Optional: fine-tune one teacher per group of labels from labelled texts."
EXAMPLES = ("amalgam train-teachers", "amalgam train-teachers train_teachers.epochs=5")
