"""Fine-tunes teachers from labelled texts."""

HELP = "Fine-tune one teacher per group of labels from labelled texts. Runs only with a `train_teachers` section."
EXAMPLES = ("amalgam train-teachers", "amalgam train-teachers train_teachers.epochs=5")
