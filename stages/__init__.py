"""The stages of amalgam: one folder per stage, shared libraries in common/, commands in app/."""

STAGE_FOLDERS = (
    "generate",
    "read_corpus",
    "train_teachers",
    "cache_teachers",
    "cache_features",
    "fit_statistics",
    "weigh_teachers",
    "build_targets",
    "make_embeddings",
    "train_student",
    "report",
)
"""Folders of the stages, in order. Each has HELP and EXAMPLES for its command, so that `--help` imports no stage."""
