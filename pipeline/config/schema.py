"""The experiment file: everything a user may say, as pydantic models, checked before anything runs.

Reading the YAML (lines, duplicate keys, hostile files) is experiment_file.py; this module is the vocabulary.
Sections other than `execution` say *what*, and enter fingerprints; `execution` says *how*, and never does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

SAFE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class ConfigSection(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )


Name = Annotated[str, StringConstraints(pattern=SAFE_NAME)]

Text = Annotated[str, StringConstraints(min_length=1, strict=True)]

Positive = Annotated[int, Field(gt=0)]

Rate = Annotated[float, Field(gt=0, lt=1)]

Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""As Accelerate names them."""


# What several sections have in common, with its meaning.
Seed = Annotated[int, Field(description="Another one draws everything that is random anew.")]

Revision = Annotated[
    Text | None, Field(description="A Hub branch, tag or commit; the commit it means today is pinned in the workspace.")
]

MaxTokens = Annotated[
    int, Field(gt=0, description="Longest text in tokens, special tokens included; the rest of a longer one is cut.")
]

Epochs = Annotated[int, Field(gt=0, description="How often each text is learned from.")]

LearningRate = Annotated[
    float, Field(gt=0, description="Its largest value; it falls to nothing in a straight line after the warm-up.")
]

BatchSize = Annotated[int, Field(gt=0, description="Texts of one step.")]

Warmup = Annotated[float, Field(ge=0, lt=1, description="Share of the steps in which the learning rate rises.")]

WeightDecay = Annotated[float, Field(ge=0, description="AdamW's, of matrices, not of biases and norms.")]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[Text], BeforeValidator(_as_list), Field(min_length=1)]


def _as_choices(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]


Temperatures = Annotated[
    list[Annotated[float, Field(ge=0)]], BeforeValidator(_as_choices), Field(min_length=1, max_length=16)
]

Shares = Annotated[
    list[Annotated[float, Field(gt=0, le=1)]], BeforeValidator(_as_choices), Field(min_length=1, max_length=16)
]

Counts = Annotated[list[Positive], BeforeValidator(_as_choices), Field(min_length=1, max_length=16)]


class Objective(ConfigSection):
    """What the student learns of the teachers' hidden states, beside its targets; `student.method` sets the name."""

    name: Literal["targets", "layerwise", "dfa", "cfl", "mt-bert", "stratanet", "as-dfd"] = "targets"
    """targets: the targets alone. layerwise: Shen et al. 2019. dfa: its amalgamated states as a guide beside the
    targets. cfl: Luo et al. 2019. mt-bert: Wu et al. 2021, each teacher's states as a guide through maps of its own.
    stratanet: Vijayaraghavan et al. 2024, amalgamated by how foreign a text is to each teacher. as-dfd: Ma et al. 2020,
    from pseudo embeddings and no text."""
    states: Literal["pooled", "tokens"] = "pooled"
    """Of the teachers' states: the mean over a text's tokens, or each token's, where all tokenise like the student."""
    blocks: Positive | None = None
    """Each teacher's layers are averaged in so many shares; null: as many as the student has layers."""
    amalgamation: Literal["dfa", "ifa"] = "dfa"
    """layerwise: the teachers' states are squeezed together all at once, or two at a time."""
    adapter: bool = True
    """layerwise: a linear map (FAM) stands between the amalgamated states and the student's layers."""
    schedule: Literal["layer-wise", "joint", "both"] = "both"
    """layerwise: layer by layer from the amalgamated states, or end to end from the targets, or one after the other."""
    weights: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=3, max_length=3)] | None = None
    """Of the targets, of the states and of the states' reconstruction; null: the method's own."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Of the maps that an objective adds: they start from nothing, and stay behind."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """stratanet: the states' share of the loss; the targets have the rest."""
    fusion: Literal["st", "multiply", "no-st"] = "st"
    """stratanet: a Transformer layer over the teachers' states, confidences added to them or multiplied with them; or
    none, a linear map of their weighted sum."""

    @property
    def read_states(self) -> Literal["pooled", "tokens"] | None:
        """The grain of the teachers' states that are looked at, if any."""
        if self.name in {"targets", "as-dfd"} or (self.name == "layerwise" and self.schedule == "joint"):
            return None
        return self.states

    @property
    def read(self) -> set[str]:
        """The fields that this objective reads: others change nothing."""
        if self.name == "targets":
            return set()
        if self.name == "as-dfd":
            return {"name"}
        if self.name == "stratanet":
            return {"name", "blocks", "alpha", "fusion", "learning_rate"}
        if self.name != "layerwise":
            return {"name", "states", "blocks", "weights", "learning_rate"}
        states = {"states", "amalgamation", "adapter", "weights", "learning_rate"} if self.read_states else set()
        return {"name", "schedule"} | states


class PseudoEmbeddings(ConfigSection):
    """What as-dfd makes in the place of texts, for each teacher and class."""

    count: Positive = 128
    """For each teacher and class."""
    tokens: Positive = 16
    """Of each, special ones not counted."""
    steps: Positive = 100
    """Of Adam, by which an embedding moves."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.02
    """Adam's."""
    adversarial: Annotated[float, Field(ge=0)] = 0.1
    """Weight of being hard to guess from the other tokens, beside the cross-entropy of the class."""
    seed: Seed = 0


SCHEMA_VERSION = 2
RENAMED = {
    f"{section}.{old}": f"{section}.{new}"
    for section, old, new in (
        ("cache", "on_long", "on_long_text"),
        ("execution", "address", "ray.address"),
        ("execution", "cpus", "ray.cpus"),
        ("execution", "gpus", "ray.gpus"),
        ("execution", "versions", "on_version_change"),
        ("generate", "fast", "max_scored"),
        ("generate", "steer", "steering_strength"),
        ("objective", "adaption", "adapter"),
        ("objective", "grain", "states"),
        ("objective", "learning", "schedule"),
        ("objective", "strata", "fusion"),
        ("targets", "reweight", "text_weights"),
        ("targets", "signal", "weight_signal"),
        ("targets", "smoothings", "smoothing_rounds"),
        ("targets", "surest", "reference_fraction"),
        ("targets", "weights", "teacher_weights"),
        ("train_teachers", "together", "co_train"),
    )
} | {"embeddings": "pseudo_embeddings"}
"""Keys of schema_version 1 and their names today."""

UNTRAINED = ("ensemble", "zero-shot")

TEACHER = "teacher:"
"""The methods that make no student, and how the one begins that is a single teacher."""

COMPARATIVE = ("rmd", "md", "msp")
"""Names of targets.uncertainty that compare teachers with each other, by how foreign a text is to each."""


class Corpus(ConfigSection):
    """The texts. A path is a csv, jsonl or parquet file, a folder of them, or an hf:// or s3:// address."""

    train: Texts | None
    """Texts to learn from; labels in them are read only by train-teachers and the supervised student.
    Left out where a generate section makes them."""
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
    rename: dict[Text, Text] = {}
    """Gold labels to change: {as it stands in the files: as the teachers call it}. Several may become one."""
    limit: Positive | None = None
    """At most this many training texts: a sample by content, the same whatever the order of the rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    """skip: rows without a usable text, id or label are left out, counted and listed in skipped.parquet."""


class Teacher(ConfigSection):
    """A fine-tuned text classifier."""

    name: Name
    """Letters, digits, `.`, `_` and `-`; tables and results call it so."""
    model: Text
    """A folder (./like/this), a Hub id, or package:module/folder for one that an installed Python package carries."""
    revision: Revision = None
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


class TrainTeachers(ConfigSection):
    """Optional: fine-tune teachers from the labelled training texts, one per group of labels, or some together."""

    encoder: Text | None = None
    """Of every teacher that learns by itself."""
    revision: Revision = None
    groups: Annotated[int, Field(ge=1)] | Annotated[dict[Name, list[Text]], Field(min_length=1)] | None = None
    """A number: the labels, sorted by name, cut into so many groups, the remainder in the last. Or name: [labels]."""
    co_train: Annotated[dict[Name, Text], Field(min_length=1)] | None = None
    """Instead of encoder and groups, name: encoder. All learn all labels at once, under one attentive pooling and one
    dense layer that they share (MT-BERT's co-finetuning)."""
    texts: Texts | None = None
    """Labelled texts to train them on. If not given, the training part of the corpus: more texts then retrain them."""
    limit: Positive | None = None
    """At most this many of `texts`, a sample by content as corpus.limit is."""
    max_tokens: MaxTokens = 128
    epochs: Epochs = 3
    learning_rate: LearningRate = 2e-5
    batch_size: BatchSize = 32
    warmup: Warmup = 0.1
    weight_decay: WeightDecay = 0.01
    seed: Seed = 0


class Generate(ConfigSection):
    """Texts where there are none. Of several temperatures, top_k, top_p or prompts each text draws its own."""

    source: Literal["steered", "prompted", "random-words", "cross-domain"] = "steered"
    """steered: a language model, each token weighed by the teacher. prompted: a language model, a prompt per class.
    random-words: words of the teachers' vocabularies. cross-domain: any corpus."""
    texts: Positive = 200
    """Per teacher and class. More later extend the set."""
    language_model: Text | None = None
    """A causal language model: a folder (./like/this), a Hub id, or package:module/folder."""
    revision: Revision = None
    prompt: Texts | None = None
    """What stands before a text and is no part of it; {label} in it is the class."""
    steering_strength: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """lambda: a token's weight is its probability in the language model times the teacher's of the class, to this."""
    candidates: Annotated[int, Field(ge=1, le=10_000)] = 200
    """The language model's so many likeliest tokens are weighed."""
    temperature: Temperatures | None = None
    """Of the language model, before it is steered; 0: always the best token. Steered: 1; prompted: 0.7, 1 and 1.3."""
    top_k: Counts | None = None
    """Of the candidates, only so many, before they are steered. Steered: all; prompted: 20, 50 and 200."""
    top_p: Shares | None = None
    """Of the candidates, only those that make up this much of the language model's probability, before they are
    steered. Steered: 0.9; prompted: 0.8, 0.9 and 1."""
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Longest text in the language model's tokens; random-words: half as many words at most."""
    max_scored: Positive | None = None
    """Score at most so many candidates a token: not exact, and cheaper where steer is large."""
    seed: Seed = 0
    corpus: Texts | None = None
    """Of cross-domain: the texts to take a sample of."""
    column: Text = "text"
    """Of cross-domain: the text column."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the texts that no student learns from, kept for statistics of the teachers."""
    min_class_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Gate: the teacher's, of the class that the text was written for. Gates are filters: they generate nothing."""
    max_duplicate: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Gate: most that a text may share with an earlier one, of their sequences of three words (Jaccard)."""
    max_repetition: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Gate: most of its own sequences of three words that may be repetitions."""
    min_words: Positive = 3
    """Gate: shorter texts are left out."""

    @property
    def writes(self) -> bool:
        """Whether a language model is at work."""
        return self.source in {"steered", "prompted"}


class Cache(ConfigSection):
    """What the teachers are asked, once per text."""

    passes: Annotated[int, Field(ge=0, le=4096)] = 16
    """Monte-Carlo dropout passes per text and teacher (K)."""
    adaptive: bool = False
    """Texts whose surest teacher is settled after 4 or 8 passes stop there; one in a hundred is audited."""
    seed: int = 0
    """Every dropout mask is a pure function of (seed, teacher, text, pass, site)."""
    dropout: Rate | None = None
    """A rate for every teacher; null: the rates each model was trained with."""
    max_tokens: MaxTokens = 128
    on_long_text: Literal["truncate", "error"] = "truncate"
    """error: a text longer than max_tokens is refused, and named."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is decided once per workspace by the hardware, and pinned there."""


class Targets(ConfigSection):
    """What the student is to learn, built from the cache alone."""

    mode: Literal["soft", "hard", "vanilla-kd", "uhc", "scores", "mt-bert", "stratanet", "supervised"] = "soft"
    """soft, hard: MUKA. vanilla-kd: softmax of all logits side by side. uhc: each teacher on its own labels.
    scores: all logits side by side, as they are. mt-bert: teachers of one label set, each by how right it is, and the
    gold labels. stratanet: each teacher by how little foreign a text is to it. supervised: the gold labels."""
    uncertainty: Literal[
        "entropy",
        "expected-entropy",
        "mutual-information",
        "variation-ratio",
        "max-probability",
        "energy",
        "rmd",
        "md",
        "msp",
    ] = "entropy"
    """The last three weigh teachers against each other, by how foreign a text is to each among its own: its state's
    (relative) Mahalanobis distance, or its largest probability."""
    reference_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of a teacher's own texts that rmd, md and msp learn from, of each class those that it is surest of."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """tau of MUKA-Soft: weights of the teachers = softmax(confidence / tau)."""
    distribution: Literal["deterministic", "mc-mean", "top-label"] = "deterministic"
    """What the target has of a teacher: its distribution with dropout off, the mean of the passes, or, dropout off, its
    first label alone, which a student of many labels learns in fewer steps."""
    text_weights: Literal["margin", "margin-normalised", "none"] = "margin"
    """A text's weight in the loss: how far the first teacher is ahead of the second; that over its mean; or 1."""
    passes: Annotated[int, Field(ge=0)] | None = None
    """Use only the first so many of the cached passes; 0: the dropout-off pass alone."""
    kd_temperature: Annotated[float, Field(gt=0)] = 1.0
    """T of vanilla-kd, uhc and stratanet, t of mt-bert."""
    task_loss: bool = True
    """mt-bert: the gold labels are learned beside the teachers. What reweight: none leaves out of it is the teachers'
    weights; without both no label is read."""
    teacher_weights: Literal["muka", "standardised", "mixture"] = "muka"
    """Of the teachers, in soft and hard targets. muka: by each text's own confidences. standardised: by each teacher's
    signal in its own deviations over the texts. mixture: the teachers' shares of the texts are estimated too."""
    weight_signal: Literal["confidence", "margin", "all"] = "confidence"
    """What says that a teacher knows a text, where weights are not muka: its confidence, its logit margin, or all that
    speaks for it: its answer, its states, and the names of its labels."""
    neighbours: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Average the signal over so many of the most similar texts, by the student's encoder; not with muka. Where all
    signals are taken: over a fifth of them or all, by the encoder alone or with the teachers' states, as fits each."""
    smoothing_rounds: Annotated[int, Field(ge=1, le=10)] = 1
    """How often a single signal is averaged over the neighbours; where all are taken, once, beside the text's own."""

    @property
    def reads_gold(self) -> bool:
        """Whether the training texts' gold labels are part of what is learned."""
        return self.mode == "supervised" or (self.mode == "mt-bert" and (self.task_loss or self.text_weights != "none"))

    @property
    def weighs_together(self) -> bool:
        """Whether teachers' weights on a text depend on the other texts."""
        return self.mode in {"soft", "hard"} and self.teacher_weights != "muka"

    @property
    def looks_at_neighbours(self) -> bool:
        return self.weighs_together and self.neighbours > 0

    @property
    def looks_at_states(self) -> bool:
        """Whether the teachers' last states are among the signals."""
        return self.weighs_together and self.weight_signal == "all"

    @property
    def looks_at_encoder(self) -> bool:
        """Whether texts' places in the student's encoder are needed: for neighbours, or beside the teachers' states."""
        return self.looks_at_neighbours or self.looks_at_states


class Student(ConfigSection):
    """The one model that comes out."""

    name: Name = "student"
    """The finished model is placed in students/NAME beside the experiment file."""
    method: Text | None = None
    """A name from `amalgam methods`: sets defaults for targets, which the file overrides."""
    encoder: Text = "sentence-transformers/all-MiniLM-L6-v2"
    """A folder (./like/this), a Hub id, package:module/folder, or teacher:NAME to begin as that teacher's body."""
    revision: Revision = None
    layers: Positive | None = None
    """Keep only the encoder's first so many layers."""
    dropout: Rate | None = None
    """At every site of the student while it learns; null: the rates of the encoder's config."""
    max_tokens: MaxTokens = 128
    epochs: Epochs = 3
    learning_rate: LearningRate = 2e-5
    batch_size: BatchSize = 32
    accumulate: Positive = 1
    """Split each batch into so many parts; the result is the same, the memory less."""
    warmup: Warmup = 0.1
    weight_decay: WeightDecay = 0.01
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of a step's gradient."""
    evaluate_every: Positive = 100
    """Steps between evaluations; the best checkpoint is kept."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the texts kept aside to select on when there is no labelled validation part."""
    select: Literal["auto", "validation", "held-out"] = "auto"
    """What the best checkpoint is chosen by; auto: validation where there is such a part, else the texts held out."""
    seed: Seed = 0

    @property
    def learns(self) -> bool:
        """Whether the method makes a student at all: `teacher:NAME`, `ensemble` and `zero-shot` are only measured."""
        return not (self.method in UNTRAINED or (self.method or "").startswith(TEACHER))


class Report(ConfigSection):
    calibration_bins: Annotated[int, Field(ge=2, le=100)] = 15
    """Of the expected calibration error (ECE)."""


class Ray(ConfigSection):
    """Where the Ray cluster is, and the resources of one task."""

    address: Text | None = None
    """HOST:PORT of the cluster; null: RAY_ADDRESS, else the cluster of this machine."""
    cpus: Positive = 1
    """CPU cores of one task, one thread each."""
    gpus: Annotated[float, Field(ge=0, le=64)] = 0
    """GPUs of one task; 0.5 lets two tasks share a GPU."""


class Execution(ConfigSection):
    """How, never what: nothing here changes a result, and nothing here reruns a stage."""

    workspace: Text = "artifacts"
    """The folder of all results, beside the experiment file; or in an object store: s3://BUCKET/PREFIX, gs:// or az://."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: the GPU where there is one."""
    engine: Literal["local", "ray"] = "local"
    """ray: units are tasks of a Ray cluster that is there already; the workspace is one that all nodes reach."""
    ray: Ray = Ray()
    """The Ray cluster and the size of a task on it."""
    processes: Positive | None = None
    """Refuse to run with any other number of processes."""
    batch_tokens: Positive | None = None
    """Tokens of one launch, all passes counted; null: as many as suit the device."""
    training_checkpoint_seconds: Positive = 120
    """Between two states of a training that an interrupted run goes on from."""
    trackers: list[Tracker] = []
    """Experiment trackers that hear a training's loss, learning rate, score and speed, and nothing else."""
    on_version_change: Literal["warn", "strict"] = "warn"
    """strict: results made with other library versions are made again."""


class ExperimentConfig(ConfigSection):
    """All of it. `amalgam.Experiment` is such a file with its workspace, at work."""

    schema_version: Literal[2] = 2
    """Of this file's format."""
    corpus: Corpus
    teachers: list[Teacher] = []
    train_teachers: TrainTeachers | None = None
    generate: Generate | None = None
    cache: Cache = Cache()
    targets: Targets = Targets()
    student: Student = Student()
    objective: Objective = Objective()
    pseudo_embeddings: PseudoEmbeddings = PseudoEmbeddings()
    report: Report = Report()
    execution: Execution = Execution()

    @model_validator(mode="before")
    @classmethod
    def _generated(cls, data: Any) -> Any:
        """With a generate section, or as-dfd, the corpus needs no training texts, and may be left out."""
        said = data.get("objective") if isinstance(data, dict) else None
        no_texts = isinstance(said, dict) and said.get("name") == "as-dfd"
        if not isinstance(data, dict) or (data.get("generate") is None and not no_texts):
            return data
        corpus = {} if data.get("corpus") is None else data["corpus"]
        return {**data, "corpus": {"train": None, **corpus} if isinstance(corpus, dict) else corpus}

    @property
    def reads_texts(self) -> bool:
        """Whether the student learns from texts at all."""
        return self.objective.name != "as-dfd"

    @property
    def teacher_names(self) -> list[str]:
        """Trained ones first, as in the union of labels."""
        groups = (self.train_teachers.groups or self.train_teachers.co_train or ()) if self.train_teachers else ()
        trained = [f"teacher-{number + 1}" for number in range(groups)] if isinstance(groups, int) else list(groups)
        return [*trained, *(teacher.name for teacher in self.teachers)]
