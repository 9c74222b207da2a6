"""The experiment file: everything a user may say, as pydantic models, checked before anything runs.

Reading the YAML (lines, duplicate keys, hostile files) is experiment_file.py; this module is the vocabulary.
Sections other than `execution` say *what*, and enter fingerprints; `execution` says *how*, and never does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

SCHEMA_VERSION = 1
UNTRAINED = ("ensemble", "zero-shot")
TEACHER = "teacher:"
"""The methods that make no student, and how the one begins that is a single teacher."""
SAFE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Name = Annotated[str, StringConstraints(pattern=SAFE_NAME)]
Text = Annotated[str, StringConstraints(min_length=1, strict=True)]
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[Text], BeforeValidator(_as_list), Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )


class Corpus(Section):
    """The texts. A path is a csv, jsonl or parquet file, a folder of them, or an hf:// or s3:// address."""

    train: Texts
    """Texts to learn from; labels in them are read only by train-teachers and the supervised student."""
    validation: Texts | None = None
    """Labelled texts to choose the student's checkpoint by."""
    test: Texts | None = None
    """Labelled texts that the report is measured on."""
    text: Annotated[Texts, Field(max_length=2)] = ["text"]
    """The text column, or two columns for pairs of texts."""
    id: Text = "auto"
    """A column of unique ids, or auto: texts are known by their content alone."""
    id_type: Literal["auto", "string"] = "auto"
    """string: numbers and text may mix in the id column; 1 and "1" are then the same id, and refused as duplicates."""
    label: Text | None = None
    """The column of gold labels."""
    labels: Annotated[list[Text], Field(min_length=2)] | None = None
    """Every allowed gold label; also names integer labels, by position."""
    limit: Positive | None = None
    """At most this many training texts: a sample by content, the same whatever the order of the rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    """skip: rows without a usable text, id or label are left out, counted and listed in skipped.parquet."""


class Teacher(Section):
    """A fine-tuned text classifier."""

    name: Name
    model: Text
    """A folder (./like/this), a Hub id, or package:module/folder for one that an installed Python package carries."""
    revision: Text | None = None
    """A Hub branch, tag or commit; the commit it means today is pinned in the workspace."""
    labels: Annotated[list[Text], Field(min_length=1)] | None = None
    """The label names, by position, where the model's own (id2label) are missing or unwanted."""
    rename: dict[Text, Text] = {}
    """Names to change: {the model's name: the name in the union}."""
    max_tokens: Positive | None = None
    """Longest text in tokens, special tokens included; cache.max_tokens if not given."""
    dropout: Rate | None = None
    """Dropout rate at every site, where the model's own is zero or unwanted; cache.dropout if not given."""
    trust_remote_code: bool = False
    """Runs code from the model's repository. Only with a revision that is a full commit."""
    allow_pickle: bool = False
    """Loads pickle weights, which can run code. Only for files you made."""


class TrainTeachers(Section):
    """Optional: fine-tune teachers from the labelled training texts, one per group of labels, or some together."""

    encoder: Text | None = None
    """Of every teacher that learns by itself."""
    revision: Text | None = None
    groups: Annotated[int, Field(ge=1)] | Annotated[dict[Name, list[Text]], Field(min_length=1)] | None = None
    """A number: the labels, sorted by name, cut into so many groups, the remainder in the last. Or name: [labels]."""
    together: Annotated[dict[Name, Text], Field(min_length=1)] | None = None
    """Instead of encoder and groups, name: encoder. All learn all labels at once, under one attentive pooling and one
    dense layer that they share (MT-BERT's co-finetuning)."""
    texts: Texts | None = None
    """Labelled texts to train them on. If not given, the training part of the corpus: more texts then retrain them."""
    limit: Positive | None = None
    """At most this many of `texts`, a sample by content as corpus.limit is."""
    max_tokens: Positive = 128
    epochs: Positive = 3
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    batch_size: Positive = 32
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    seed: int = 0


class Cache(Section):
    """What the teachers are asked, once per text."""

    passes: Annotated[int, Field(ge=0, le=4096)] = 16
    """Monte-Carlo dropout passes per text and teacher (K)."""
    adaptive: bool = False
    """Texts whose surest teacher is settled after 4 or 8 passes stop there; one in a hundred is audited."""
    seed: int = 0
    """Every dropout mask is a pure function of (seed, teacher, text, pass, site)."""
    dropout: Rate | None = None
    """A rate for every teacher; null: the rates each model was trained with."""
    max_tokens: Positive = 128
    on_long: Literal["truncate", "error"] = "truncate"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is decided once per workspace by the hardware, and pinned there."""


class Targets(Section):
    """What the student is to learn, built from the cache alone."""

    mode: Literal["soft", "hard", "vanilla-kd", "uhc", "scores", "mt-bert", "supervised"] = "soft"
    """soft, hard: MUKA. vanilla-kd: softmax of all logits side by side. uhc: each teacher on its own labels.
    scores: all logits side by side, as they are. mt-bert: teachers of one label set, each by how right it is, and the
    gold labels. supervised: the gold labels."""
    uncertainty: Literal[
        "entropy", "expected-entropy", "mutual-information", "variation-ratio", "max-probability", "energy"
    ] = "entropy"
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """tau of MUKA-Soft: weights of the teachers = softmax(confidence / tau)."""
    distribution: Literal["deterministic", "mc-mean"] = "deterministic"
    """The teachers' distributions in the target: dropout off, or the mean of the passes."""
    reweight: Literal["margin", "margin-normalised", "none"] = "margin"
    passes: Annotated[int, Field(ge=0)] | None = None
    """Use only the first so many of the cached passes; 0: the dropout-off pass alone."""
    kd_temperature: Annotated[float, Field(gt=0)] = 1.0
    """T of vanilla-kd and uhc, t of mt-bert."""
    task_loss: bool = True
    """mt-bert: the gold labels are learned beside the teachers. What reweight: none leaves out of it is the teachers'
    weights; without both no label is read."""
    weights: Literal["muka", "standardised", "mixture"] = "muka"
    """Of the teachers, in soft and hard targets. muka: by each text's own confidences. standardised: by each teacher's
    signal in its own deviations over the texts. mixture: the teachers' shares of the texts are estimated too."""
    signal: Literal["confidence", "margin", "all"] = "confidence"
    """What says that a teacher knows a text, where weights are not muka: its confidence, its logit margin, or all that
    speaks for it: its answer, its states, and the names of its labels."""
    neighbours: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Average the signal over so many of the most similar texts, by the student's encoder; not with muka. Where all
    signals are taken: over a fifth of them or all, by the encoder alone or with the teachers' states, as fits best."""
    smoothings: Annotated[int, Field(ge=1, le=10)] = 1
    """How often a single signal is averaged over the neighbours; where all are taken, once, beside the text's own."""

    @property
    def reads_gold(self) -> bool:
        """Whether the training texts' gold labels are part of what is learned."""
        return self.mode == "supervised" or (self.mode == "mt-bert" and (self.task_loss or self.reweight != "none"))

    @property
    def weighs_together(self) -> bool:
        """Whether teachers' weights on a text depend on the other texts."""
        return self.mode in {"soft", "hard"} and self.weights != "muka"

    @property
    def looks_at_neighbours(self) -> bool:
        return self.weighs_together and self.neighbours > 0

    @property
    def looks_at_states(self) -> bool:
        """Whether the teachers' last states are among the signals."""
        return self.weighs_together and self.signal == "all"

    @property
    def looks_at_encoder(self) -> bool:
        """Whether texts' places in the student's encoder are needed: for neighbours, or beside the teachers' states."""
        return self.looks_at_neighbours or self.looks_at_states


class Student(Section):
    """The one model that comes out."""

    name: Name = "student"
    """The finished model is placed in students/NAME beside the experiment file."""
    method: Text | None = None
    """A name from `amalgam methods`: sets defaults for targets, which the file overrides."""
    encoder: Text = "sentence-transformers/all-MiniLM-L6-v2"
    """A folder (./like/this), a Hub id, package:module/folder, or teacher:NAME to begin as that teacher's body."""
    revision: Text | None = None
    layers: Positive | None = None
    """Keep only the encoder's first so many layers."""
    max_tokens: Positive = 128
    epochs: Positive = 3
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    batch_size: Positive = 32
    accumulate: Positive = 1
    """Split each batch into so many parts; the result is the same, the memory less."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] = 1.0
    evaluate_every: Positive = 100
    """Steps between evaluations; the best checkpoint is kept."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the texts kept aside to select on when there is no labelled validation part."""
    select: Literal["auto", "validation", "held-out"] = "auto"
    seed: int = 0

    @property
    def learns(self) -> bool:
        """Whether the method makes a student at all: `teacher:NAME`, `ensemble` and `zero-shot` are only measured."""
        return not (self.method in UNTRAINED or (self.method or "").startswith(TEACHER))


class Objective(Section):
    """What the student learns of the teachers' hidden states, beside its targets; `student.method` sets the name."""

    name: Literal["targets", "layerwise", "dfa", "cfl", "mt-bert"] = "targets"
    """targets: the targets alone. layerwise: Shen et al. 2019. dfa: its amalgamated states as a guide beside the
    targets. cfl: Luo et al. 2019. mt-bert: Wu et al. 2021, each teacher's states as a guide through maps of its own."""
    grain: Literal["pooled", "tokens"] = "pooled"
    """Of the teachers' states: the mean over a text's tokens, or each token's, where all tokenise like the student."""
    blocks: Positive | None = None
    """Each teacher's layers are averaged in so many shares; null: as many as the student has layers."""
    amalgamation: Literal["dfa", "ifa"] = "dfa"
    """layerwise: the teachers' states are squeezed together all at once, or two at a time."""
    adaption: bool = True
    """layerwise: a linear map (FAM) stands between the amalgamated states and the student's layers."""
    learning: Literal["layer-wise", "joint", "both"] = "both"
    """layerwise: layer by layer from the amalgamated states, or end to end from the targets, or one after the other."""
    weights: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=3, max_length=3)] | None = None
    """Of the targets, of the states and of the states' reconstruction; null: the method's own."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Of the maps that an objective adds: they start from nothing, and stay behind."""

    @property
    def states(self) -> Literal["pooled", "tokens"] | None:
        """The grain of the teachers' states that are looked at, if any."""
        if self.name == "targets" or (self.name == "layerwise" and self.learning == "joint"):
            return None
        return self.grain

    @property
    def read(self) -> set[str]:
        """The fields that this objective reads: others change nothing."""
        if self.name == "targets":
            return set()
        if self.name != "layerwise":
            return {"name", "grain", "blocks", "weights", "learning_rate"}
        states = {"grain", "amalgamation", "adaption", "weights", "learning_rate"} if self.states else set()
        return {"name", "learning"} | states


class Report(Section):
    calibration_bins: Annotated[int, Field(ge=2, le=100)] = 15


class Execution(Section):
    """How, never what: nothing here changes a result, and nothing here reruns a stage."""

    workspace: Text = "artifacts"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    processes: Positive | None = None
    """Refuse to run with any other number of processes."""
    batch_tokens: Positive | None = None
    """Tokens of one launch, all passes counted; null: as many as suit the device."""
    training_checkpoint_seconds: Positive = 120
    versions: Literal["warn", "strict"] = "warn"
    """strict: results made with other library versions are made again."""


class Experiment(Section):
    schema_version: Literal[1] = 1
    corpus: Corpus
    teachers: list[Teacher] = []
    train_teachers: TrainTeachers | None = None
    generate: None = None
    """Stage 0 (texts from a language model) is not part of this version."""
    cache: Cache = Cache()
    targets: Targets = Targets()
    student: Student = Student()
    objective: Objective = Objective()
    report: Report = Report()
    execution: Execution = Execution()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        problems = [*self._teacher_problems(), *self._method_problems(), *self._corpus_problems()]
        problems += self._objective_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def teacher_names(self) -> list[str]:
        """Trained ones first, as in the union of labels."""
        groups = (self.train_teachers.groups or self.train_teachers.together or ()) if self.train_teachers else ()
        trained = [f"teacher-{number + 1}" for number in range(groups)] if isinstance(groups, int) else list(groups)
        return [*trained, *(teacher.name for teacher in self.teachers)]

    def _method_problems(self) -> list[str]:
        """A problem is one sentence without a semicolon: they are told apart by it."""
        method, encoder, names = str(self.student.method), self.student.encoder, self.teacher_names
        problems = []
        if encoder.startswith(TEACHER) and encoder.removeprefix(TEACHER) not in names:
            problems.append(f"student.encoder: no teacher has this name (known: {', '.join(names)})")
        if self.student.learns:
            return problems
        if self.corpus.test is None:
            problems.append(f"student.method: {method} trains nothing and is only measured, which needs corpus.test")
        if method.startswith(TEACHER) and method.removeprefix(TEACHER) not in names:
            problems.append(f"student.method: no teacher has this name (known: {', '.join(names)})")
        return problems

    def _teacher_problems(self) -> list[str]:
        names = self.teacher_names
        problems = [
            f"teachers: the name {name!r} is given twice" for name in sorted(set(names)) if names.count(name) > 1
        ]
        if not names and self.train_teachers is None and self.targets.mode != "supervised":
            problems.append("teachers: name at least one, or a train_teachers section that makes them")
        problems += self._training_problems()
        problems += [
            f"teachers: {teacher.name}: trust_remote_code needs revision to be a full commit hash"
            for teacher in self.teachers
            if teacher.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", teacher.revision or "")
        ]
        return problems

    def _training_problems(self) -> list[str]:
        said = self.train_teachers
        if said is None:
            return []
        given = [name for name in ("encoder", "groups", "revision") if getattr(said, name) is not None]
        if said.together:
            return [f"train_teachers.{name}: is not for teachers that are trained together" for name in given]
        return [f"train_teachers.{name}: is required" for name in ("encoder", "groups") if name not in given]

    def _corpus_problems(self) -> list[str]:
        needs_label = {
            "train_teachers": self.train_teachers is not None,
            "corpus.validation": self.corpus.validation is not None,
            "corpus.test": self.corpus.test is not None,
            f"targets.mode: {self.targets.mode}": self.targets.reads_gold,
        }
        problems = [
            f"corpus.label: {who} needs the name of the label column"
            for who, needed in needs_label.items()
            if needed and self.corpus.label is None
        ]
        if self.train_teachers and self.train_teachers.limit and self.train_teachers.texts is None:
            problems.append("train_teachers.limit: needs train_teachers.texts; corpus.limit cuts the training part")
        if self.student.select == "validation" and self.corpus.validation is None:
            problems.append("student.select: validation needs corpus.validation")
        if self.targets.passes is not None and self.targets.passes > self.cache.passes:
            problems.append(f"targets.passes: {self.targets.passes} is more than cache.passes, {self.cache.passes}")
        return problems

    def _objective_problems(self) -> list[str]:
        said, who = self.objective, f"objective.name: {self.objective.name}"
        problems = []
        if said.states and not self.teachers and self.train_teachers is None:
            problems.append(f"{who} looks at teachers' states, and there is no teacher")
        if said.name == "layerwise" and said.states == "pooled":
            problems.append(
                "objective.grain: the student's layers read tokens, so layer-wise learning needs tokens; "
                "where teachers tokenise otherwise: objective.learning=joint"
            )
        if said.name == "cfl" and said.grain == "tokens":
            problems.append("objective.grain: cfl compares texts, each by the mean of its tokens: pooled")
        if said.name == "cfl" and self.student.accumulate > 1:
            problems.append("student.accumulate: cfl compares the texts of a step with each other: 1")
        if said.name == "layerwise" and said.blocks is not None:
            problems.append("objective.blocks: layer-wise learning needs a block for each layer of the student: null")
        return problems
