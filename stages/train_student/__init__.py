"""Trains the student from cached targets."""

HELP = "Train the student from the cached targets. No teacher runs."
EXAMPLES = (
    "amalgam train-student",
    "amalgam train-student student.epochs=5 student.name=longer",
    "amalgam train-student execution.trackers=[tensorboard]",
)
