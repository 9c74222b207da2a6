"""Examples for the commands' --help: one screen, by command. A test reads every line as the command line would."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "demo": ("amalgam demo", "amalgam demo --data-free", "amalgam demo somewhere student.epochs=2"),
    "init": (
        "amalgam init",
        "amalgam init --from-teachers ./models/desk ./models/study cardiffnlp/twitter-roberta-base-emotion",
    ),
    "generate": ("amalgam generate", "amalgam generate generate.texts=500 -c no-texts.yaml"),
    "make-embeddings": ("amalgam make-embeddings student.method=as-dfd",),
    "read-corpus": ("amalgam read-corpus", "amalgam read-corpus corpus.limit=8000 corpus.on_bad_row=skip"),
    "train-teachers": ("amalgam train-teachers", "amalgam train-teachers train_teachers.epochs=5"),
    "cache-teachers": (
        "amalgam cache-teachers",
        "amalgam cache-teachers cache.passes=24",
        "amalgam cache-teachers --part 0/4",
    ),
    "build-targets": (
        "amalgam build-targets --mode hard",
        "amalgam build-targets targets.temperature=0.5 --no-upstream",
    ),
    "train-student": (
        "amalgam train-student",
        "amalgam train-student student.epochs=5 student.name=longer",
        "amalgam train-student execution.trackers=[tensorboard]",
    ),
    "report": ("amalgam report", "amalgam report report.calibration_bins=10"),
    "run": ("amalgam run", "amalgam run student.method=muka-soft", "amalgam run -c other.yaml --quiet"),
    "sweep": (
        "amalgam sweep student.seed=0,1,2",
        "amalgam sweep student.method=muka-soft,amalgam student.seed=0,1,2 execution.engine=ray",
    ),
    "plan": (
        "amalgam plan",
        "amalgam plan student.method=muka-soft",
        "amalgam plan --tree",
        "amalgam plan --estimate --json",
    ),
    "explain": ("amalgam explain build-targets targets.temperature=0.5",),
    "status": ("amalgam status", "amalgam status --json"),
    "verify": ("amalgam verify",),
    "gc": ("amalgam gc", "amalgam gc --unused --yes"),
    "audit": ("amalgam audit", "amalgam audit --json"),
    "methods": ("amalgam methods", "amalgam methods --json"),
    "schema": ("amalgam schema",),
    "doctor": ("amalgam doctor", "amalgam doctor -c other.yaml"),
}


def epilog(command: str) -> str | None:
    """Blank lines between them: what stands together is filled to one paragraph."""
    examples = EXAMPLES.get(command)
    return "\n\n".join(["Example:" if len(examples) == 1 else "Examples:", *examples]) if examples else None
