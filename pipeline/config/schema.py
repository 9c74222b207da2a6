"""Defines the fields of the experiment file as pydantic models; load.py reads the YAML.

Fields outside `execution` define the result and enter fingerprints; fields of `execution` never do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

SAFE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

T = TypeVar("T")


LARGEST_COUNT = 10**12
LARGEST_SEED = 2**63 - 1
LARGEST_FACTOR = 1e6
"""Bounds of counts, seeds and factors: torch computes with 64 and 32 bits."""

EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""A number such as 1e-3, which YAML 1.1 reads as text because it has no point."""


class ConfigSection(BaseModel):
    """Takes each value in its own type: no true for 1, no text for a number."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        strict=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _with_exponent(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads 1e-3 as a number where the field is one, or a list of them."""
        if "float" not in str(cls.model_fields[str(info.field_name)].annotation):
            return value
        return [_number(item) for item in value] if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


Name = Annotated[str, StringConstraints(pattern=SAFE_NAME)]

Text = Annotated[str, StringConstraints(min_length=1, strict=True)]

Positive = Annotated[int, Field(gt=0, le=LARGEST_COUNT)]

Factor = Annotated[float, Field(ge=1 / LARGEST_FACTOR, le=LARGEST_FACTOR)]

Rate = Annotated[float, Field(gt=0, lt=1)]

Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""Names of Accelerate."""


# Fields of several sections, with their definitions.
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED, description="Random seed.")]

Revision = Annotated[
    Text | None,
    Field(description="Hub branch, tag or commit; its commit is recorded at first use. null: the default branch."),
]

MaxTokens = Annotated[
    Positive, Field(description="Largest text length in tokens, special tokens included; longer texts are truncated.")
]


def _or_auto(kind: Any) -> BeforeValidator:
    """Reads auto as null: the stage then chooses the value by its inputs, and `plan` names it."""
    types = kind | Literal["auto"] | None
    return BeforeValidator(lambda value: None if value == "auto" else value, json_schema_input_type=types)


PassCount = Annotated[int, Field(ge=0, le=4096)]

PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FACTOR)]

SmallFloat = Annotated[float, Field(gt=0, le=1)]

Epochs = Annotated[
    Positive | None,
    _or_auto(Positive),
    Field(
        description="Number of passes over the training texts. auto: at least 3 and at least 300 + 10 x labels steps "
        "(three times as many for a static student), fewer beyond 30,000 steps."
    ),
]

LearningRate = Annotated[
    SmallFloat | None,
    _or_auto(SmallFloat),
    Field(
        description="Largest learning rate; after the warm-up it decreases linearly to zero. auto: "
        "5e-5 x (768 / the encoder's width)^1.5, at most 1e-3; 1e-3 for a static student."
    ),
]

BatchSize = Annotated[Positive, Field(description="Number of texts in a training step.")]

Warmup = Annotated[
    float, Field(ge=0, lt=1, description="Share of the training steps in which the learning rate rises.")
]

WeightDecay = Annotated[
    float, Field(ge=0, le=LARGEST_FACTOR, description="Weight decay of AdamW on matrices; biases and norms have none.")
]


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, list | dict) else [value]


def _distinct(labels: list[str]) -> list[str]:
    """Refuses a label twice, but for the placeholder of `init`, which is refused by its name."""
    twice = sorted(label for label, count in Counter(labels).items() if count > 1 and label != "?")
    if twice:
        raise ValueError(f"has {twice[0]!r} twice; give each label once")
    return labels


Labels = Annotated[list[Text], AfterValidator(_distinct)]

Texts = Annotated[list[Text], BeforeValidator(_as_list), Field(min_length=1)]


def _check_prompts(prompts: list[str]) -> list[str]:
    for prompt in prompts:
        for name in re.findall(r"{(\w+)}", prompt):
            if name != "label":
                raise ValueError(f"{{{name}}} is no placeholder: write {{label}} where the class belongs")
    return prompts


Values = Annotated[list[T], BeforeValidator(_as_list), Field(min_length=1, max_length=16)]

Checks = Iterator[tuple[bool, str, str]]
"""Whether fields contradict each other, the dotted path of the field to change, and the message."""


def _name_of(field: str) -> AfterValidator:
    """Checks a name against the choices in the validation's context: the stages define them, not the schema."""

    def check(name: str, info: ValidationInfo) -> str:
        choices = (info.context or {}).get(field)
        if choices is not None and name not in choices:
            raise PydanticCustomError("literal_error", "unknown name", {"expected": ", ".join(map(repr, choices))})
        return name

    return AfterValidator(check)


class Objective(ConfigSection):
    """Loss terms on the teachers' hidden states, in addition to the targets; `student.method` sets the name."""

    name: Annotated[str, _name_of("objective.name")] = "targets"
    """Loss of the student."""
    states: Literal["pooled", "tokens"] = "pooled"
    """Hidden states that the objective reads. pooled: the mean over a text's tokens. tokens: every token, if all
    teachers tokenise like the student."""
    blocks: Positive | None = None
    """Number of equal groups over which a teacher's layers are averaged; null: the number of the student's layers."""
    amalgamation: Literal["dfa", "ifa"] = "dfa"
    """Order in which layerwise combines the teachers' states. dfa: all teachers at once. ifa: two at a time."""
    adapter: bool = True
    """layerwise: use a linear map (FAM) between the amalgamated states and the student's layers."""
    schedule: Literal["layer-wise", "joint", "both"] = "both"
    """Training order of layerwise. layer-wise: each layer from the amalgamated states. joint: all layers from the
    targets. both: first layer-wise, then joint."""
    learning_rate: PositiveFloat = 1e-3
    """Largest learning rate of the objective's extra layers, which are trained from scratch and not saved."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """stratanet: share of the states' loss in the total loss; the loss of the targets has the rest."""
    fusion: Literal["st", "multiply", "no-st"] = "st"
    """Layer with which stratanet combines the teachers' states. st: a Transformer layer, confidences added. multiply: a
    Transformer layer, states multiplied by confidences. no-st: a linear map of the weighted sum."""


class PseudoEmbeddings(ConfigSection):
    """Pseudo embeddings that as-dfd trains on instead of texts, for each teacher and class."""

    count: Positive = 128
    """Number of pseudo embeddings for each teacher and class."""
    tokens: Positive = 16
    """Length of a pseudo embedding in tokens, without special tokens."""
    steps: Positive = 100
    """Number of Adam steps that optimise each pseudo embedding."""
    learning_rate: PositiveFloat = 0.02
    """Learning rate of Adam on the pseudo embeddings."""
    adversarial: Annotated[float, Field(ge=0, le=LARGEST_FACTOR)] = 0.1
    """Weight of the adversarial term, next to the cross-entropy of the class; the term makes tokens hard to predict
    from their context."""
    seed: Seed = 0


SCHEMA_VERSION = 2

UNTRAINED = ("ensemble", "zero-shot")
"""Methods without a student, in addition to `teacher:NAME`."""

NO_TEACHERS = (*UNTRAINED, "student")
"""Names of other systems in reports, which no teacher has."""

COMPARISON = "comparison"
"""Name of the page of compared reports."""

TEACHER = "teacher:"
"""Prefix of the method that evaluates a single teacher, and of a student encoder taken from one."""

FROM_CORPUS = "corpus"
"""Value of `labels` that takes the labels in the column corpus.label of the training texts."""

STATIC = "static:"
"""Prefix of the encoder from which a student without a transformer has its token vectors."""


class Corpus(ConfigSection):
    """Sources of texts. A path is a csv, tsv, jsonl or parquet file, a folder or a pattern of them, or an hf:// or s3://
    address. Local csv, tsv and jsonl files may be packed: .gz, .zst, .bz2, .xz.
    """

    train: Texts | None = None
    """Training texts; required, except for as-dfd and with a `generate` section. Their labels, if any, train only
    teachers and methods with gold labels; the report measures the targets by them."""
    validation: Texts | None = None
    """Labelled texts on which the student's best checkpoint is selected."""
    test: Texts | None = None
    """Labelled texts on which the report measures all models."""
    text: Annotated[Texts, Field(max_length=2)] = ["text"]
    """Name of the text column, or of two columns for pairs of texts."""
    id: Text = "auto"
    """Name of a column with unique ids, where 1 and "1" are the same id; auto: texts are identified by their
    content."""
    label: Text | None = None
    """Name of the column with gold labels."""
    labels: Annotated[Labels, Field(min_length=2)] | None = None
    """All allowed gold labels; integer labels are indices into this list. null: any label of a teacher."""
    rename: dict[Text, Text] = {}
    """Map from gold labels in the files to label names of the teachers; several may have the same new name."""
    unknown: Text | None = None
    """Gold label of texts that belong to no label of a teacher, such as none. The report measures whether the student
    flags such test texts. In `labels` it estimates their share, and the student does not learn them."""
    limit: Positive | None = None
    """Largest number of training texts, sampled by content independently of row order; null: all."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of rows without a usable text, id or label. error: refuse the file. skip: leave them out, count them
    and list them in skipped.parquet. Also files without rows among others, and rows of `labels` whose text is not in
    the corpus, or whose label is of no teacher."""


class Teacher(ConfigSection):
    """A fine-tuned text classifier, or a file with the predictions of any other one."""

    name: Name = ""
    """Name of the teacher in tables and results: letters, digits, `.`, `_` and `-`. "": the last part of `model`, and
    a number if it is taken. Not ensemble, zero-shot or student, which are other systems in reports.
    A teacher without other fields may be its model alone: `- ./models/first`."""
    model: Text
    """Model folder (./like/this), Hub id, package:module/folder of an installed Python package, or a file of
    predictions (csv, tsv, jsonl or Parquet)."""
    revision: Revision = None
    labels: Annotated[Labels, Field(min_length=1)] | None = None
    """Label names in the order of the model's outputs; null: the model's own names (id2label). For a file of
    predictions: its labels; null: all columns of numbers, or the labels in its rows."""
    rename: dict[Text, Text] = {}
    """Map from label names of the model to label names of the student."""
    catch_all: list[Text] = []
    """Label names of the model that mean none of its other labels, such as other. The student does not predict them,
    and a teacher weighs less where it does."""
    max_tokens: Positive | None = None
    """Largest text length in tokens, special tokens included; null: cache.max_tokens."""
    base: Text | None = None
    """The encoder that the model was fine-tuned from: a folder, a Hub id, or package:module/folder; null:
    student.encoder, if their token vectors are alike. It shows `amalgam` the tokens of the training texts."""
    dropout: Rate | None = None
    """Dropout rate at every site of the model; null: cache.dropout. It does not switch off last-layer."""
    trust_remote_code: bool = False
    """Run code from the model's repository; requires a revision that is a full commit."""
    allow_pickle: bool = False
    """Load pickle weights, which can run code; use it only for files of your own."""


class TrainTeachers(ConfigSection):
    """Optional: fine-tunes teachers from labelled training texts, one for each group of labels, or several jointly."""

    encoder: Text | None = None
    """Encoder from which every teacher starts: a folder, a Hub id, or package:module/folder. co_train names encoders
    instead."""
    revision: Revision = None
    groups: Annotated[int, Field(ge=1, le=10_000)] | Annotated[dict[Name, Labels], Field(min_length=1)] | None = None
    """Label groups, one teacher each. A number: the sorted labels are cut into this many groups, the remainder in the
    last. A map: name: [labels]."""
    co_train: Annotated[dict[Name, Text], Field(min_length=1)] | None = None
    """Map of teacher names to encoders, instead of `encoder` and `groups`. All teachers learn all labels jointly with
    shared attentive pooling and a shared dense layer (MT-BERT)."""
    texts: Texts | None = None
    """Labelled texts for the teachers; null: corpus.train, and additional texts then retrain the teachers."""
    limit: Positive | None = None
    """Largest number of train_teachers.texts, sampled by content; null: all."""
    max_tokens: MaxTokens = 128
    epochs: Epochs = None
    learning_rate: LearningRate = None
    batch_size: BatchSize = 32
    warmup: Warmup = 0.1
    weight_decay: WeightDecay = 0.01
    seed: Seed = 0


class Generate(ConfigSection):
    """Generates texts if there are none. If temperature, top_k, top_p or prompt is a list, each text draws its own
    value.
    """

    source: Literal["steered", "prompted", "random-words", "cross-domain", "recombined"] = "steered"
    """Source of the texts. steered: a language model whose tokens are weighted by the teacher. prompted: a language
    model with a prompt for each class. random-words: words from the teachers' vocabularies. cross-domain: another
    corpus. recombined: texts of a corpus, then texts made of their words."""
    texts: Positive = 200
    """Number of texts for each teacher and class; a larger number extends the existing set."""
    language_model: Text | None = None
    """Causal language model: a folder (./like/this), a Hub id, or package:module/folder."""
    revision: Revision = None
    prompt: Annotated[Texts, AfterValidator(_check_prompts)] | None = None
    """Prompts before a text; {label} is replaced by the class. They are no part of the text. null: none for steered,
    three for prompted."""
    steering_strength: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Exponent lambda of the teacher's class probability; a token's weight is its language-model probability times that
    power."""
    candidates: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Number of the language model's most likely tokens that are candidates for a position; steered: the
    teacher scores them."""
    temperature: Values[Annotated[float, Field(ge=0, le=1000)]] | None = None
    """Sampling temperature of the language model before steering; 0: the most likely token. null: 1 for steered, [0.7,
    1, 1.3] for prompted."""
    top_k: Values[Positive] | None = None
    """Number of most likely candidates kept before steering; null: all for steered, [20, 50, 200] for prompted."""
    top_p: Values[Annotated[float, Field(gt=0, le=1)]] | None = None
    """Share of the language model's probability covered by the candidates kept before steering; null: 0.9 for steered,
    [0.8, 0.9, 1] for prompted."""
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Largest text length in tokens of the language model; random-words uses 5 words or more, up to half as many."""
    max_scored: Positive | None = None
    """Largest number of candidates scored for each token; cheaper for a large steering_strength, but not exact. null:
    no limit."""
    seed: Seed = 0
    corpus: Texts | None = None
    """Source texts of cross-domain and recombined."""
    column: Text = "text"
    """Name of the text column of generate.corpus."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the texts that no student trains on, kept to fit statistics of the teachers."""
    min_class_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Filter: smallest teacher probability of the class for which a text was generated. Changed filters generate no
    texts."""
    max_duplicate: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Filter: largest Jaccard similarity of a text's word trigrams to an earlier text."""
    max_repetition: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Filter: largest share of a text's word trigrams that repeat within the text."""
    min_words: Positive = 3
    """Filter: smallest text length in words."""

    @property
    def writes(self) -> bool:
        """Returns whether a language model writes the texts."""
        return self.source in {"steered", "prompted"}

    @property
    def reads_corpus(self) -> bool:
        """Returns whether the texts are those of generate.corpus, or made of their words."""
        return self.source in {"cross-domain", "recombined"}


class Cache(ConfigSection):
    """Predictions of the teachers, computed once for each text."""

    passes: Annotated[PassCount | None, _or_auto(PassCount)] = None
    """Number K of Monte-Carlo dropout passes for each text and teacher. auto: 16 for a method that reads them, as MUKA
    does, else 0. With amalgam, at most 200 texts run 16: a sample that audits the choice without passes."""
    adaptive: bool = False
    """With MUKA, a sample runs K passes, and other texts stop where their most confident teacher is settled. Their
    confidences are predicted: the choice of teachers is nearly the same, the weights of texts are less exact."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """Random seed of dropout; each mask is a pure function of (seed, teacher, text, pass, site)."""
    dropout: Rate | Literal["last-layer"] | None = None
    """Dropout rate of every teacher; null: the rates in each model's configuration. last-layer: these rates, but only
    in the last layer and the head; the layers before it run once for all passes."""
    max_tokens: MaxTokens = 128
    on_long_text: Literal["truncate", "error"] = "truncate"
    """Treatment of texts longer than max_tokens. truncate: drop the rest. error: refuse the text by name."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of teacher inference; auto: chosen once for each workspace by the device, then fixed."""

    @property
    def rate(self) -> float | None:
        """Returns the dropout rate of every teacher; None: those of each model's configuration."""
        return self.dropout if isinstance(self.dropout, float) else None

    @property
    def last_layer(self) -> bool:
        """Returns whether passes drop units in the last layer and the head alone."""
        return self.dropout == "last-layer"


class Targets(ConfigSection):
    """Training targets of the student, built from cached predictions."""

    mode: Annotated[str, _name_of("targets.mode")] = "soft"
    """Rule that builds the targets."""
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
    """Uncertainty measure from which a teacher's confidence follows. rmd, md and msp compare teachers by distance from
    each one's own texts: (relative) Mahalanobis distance of the state, or largest probability."""
    reference_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a teacher's own texts on which rmd, md and msp are fitted; the most confident ones of each class."""
    temperature: Factor = 0.2
    """Temperature tau of MUKA-Soft; teacher weights are softmax(confidence / tau)."""
    distribution: Literal["deterministic", "mc-mean", "top-label"] = "deterministic"
    """Teacher distribution in a target. deterministic: with dropout off. mc-mean: the mean over the passes. top-label:
    the most likely label with dropout off."""
    text_weights: Literal["margin", "none"] = "margin"
    """Weight of a text in the loss. margin: lead of the best teacher over the best one with another label; 1 if all
    agree. none: 1."""
    passes: PassCount | None = None
    """Number of cached passes to use; 0: only the pass with dropout off; null: all."""
    kd_temperature: Factor = 1.0
    """Distillation temperature T of vanilla-kd, uhc and stratanet, and t of mt-bert."""
    task_loss: bool = True
    """mt-bert: add the loss on gold labels. Without it, and with text_weights: none, no gold label is read."""
    teacher_weights: Literal["muka", "standardised", "mixture", "range"] = "muka"
    """Teacher weights in soft and hard targets. muka: from the confidences on one text. standardised: from each
    teacher's evidence in standard deviations over all texts. mixture: like standardised, with estimated shares of the
    teachers. range: from evidence that is scaled by the ends of its range, label by label."""
    weight_signal: Literal["confidence", "margin", "all"] = "confidence"
    """Evidence for teacher weights other than muka. confidence: the uncertainty measure. margin: the logit margin. all:
    predictions, hidden states and label names."""
    neighbours: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of nearest texts, by the student's encoder, over which evidence is averaged; not with muka. weight_signal:
    all adds the teachers' states to the encoder's."""


class Student(ConfigSection):
    """The model that the pipeline produces."""

    name: Name = "student"
    """Folder name of the finished model in students/, next to the experiment file. Not ensemble, zero-shot, comparison
    or a teacher's name."""
    method: Text | None = None
    """Name from `amalgam methods`; it sets defaults of other fields, which the file overrides. null: amalgam, unless
    the file sets targets.mode or objective.name; then the other fields have their own defaults."""
    encoder: Text = "sentence-transformers/all-MiniLM-L6-v2"
    """Encoder from which the student starts: a folder (./like/this), Hub id, package:module/folder, or teacher:NAME for
    that teacher's encoder. static:ENCODER: token vectors of this encoder and one convolution, without a transformer."""
    revision: Revision = None
    layers: Positive | None = None
    """Number of encoder layers to keep, counted from the first; null: all."""
    dropout: Rate | None = None
    """Dropout rate at every site of the student during training; null: the rates in the encoder's configuration."""
    max_tokens: MaxTokens = 128
    epochs: Epochs = None
    learning_rate: LearningRate = None
    batch_size: BatchSize = 32
    accumulate: Positive = 1
    """Number of parts into which each batch is split to save memory; only dropout masks and rounding differ."""
    warmup: Warmup = 0.1
    weight_decay: WeightDecay = 0.01
    clip: Factor = 1.0
    """Largest norm of a step's gradient."""
    evaluate_every: Annotated[Positive | None, _or_auto(Positive)] = None
    """Number of training steps between evaluations; of equally good checkpoints the latest is kept. auto: one
    evaluation per epoch, but 10 to 20 in a training."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the texts on which the best checkpoint is selected if there is no labelled validation part. Fewer than
    200 texts select nothing: the last step is kept."""
    select: Literal["auto", "validation", "held-out"] = "auto"
    """Texts on which the best checkpoint is selected; auto: validation if it exists, else held-out."""
    seed: Seed = 0

    @property
    def learns(self) -> bool:
        """Returns whether the method trains a student; `teacher:NAME`, `ensemble` and `zero-shot` train none."""
        return not (self.method in UNTRAINED or (self.method or "").startswith(TEACHER))

    @property
    def is_static(self) -> bool:
        """Returns whether the student has token vectors of its encoder instead of a transformer."""
        return self.encoder.startswith(STATIC)


class Report(ConfigSection):
    """Settings of the report."""

    calibration_bins: Annotated[int, Field(ge=2, le=100)] = 15
    """Number of bins of the expected calibration error (ECE)."""


class Ray(ConfigSection):
    """Address of the Ray cluster, and the resources of one task."""

    address: Text | None = None
    """HOST:PORT of the cluster; null: RAY_ADDRESS, else the cluster of this machine."""
    cpus: Positive = 1
    """CPU cores of one task, one thread each."""
    gpus: Annotated[float, Field(ge=0, le=64)] = 0
    """GPUs of one task; 0.5 lets two tasks share a GPU."""


class Execution(ConfigSection):
    """Where and how stages run; no field changes a result.

    Another workspace, and on_version_change: strict, run the stages again.
    """

    workspace: Text = "artifacts"
    """Folder of all results, relative to the experiment file, or an object store: s3://BUCKET/PREFIX, gs:// or
    az://."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of all models; auto: a GPU if one exists, else the CPU."""
    engine: Literal["local", "ray"] = "local"
    """Scheduler of units. local: this process. ray: tasks of a running Ray cluster, with a workspace that all nodes can
    reach."""
    ray: Ray = Ray()
    """Ray cluster, and the size of a task on it."""
    processes: Positive | None = None
    """Required number of processes; another number is refused. null: any."""
    batch_tokens: Positive | None = None
    """Tokens in a batch of inference, all passes counted; null: chosen for the device."""
    training_checkpoint_seconds: Positive = 120
    """Seconds between checkpoints from which an interrupted training continues."""
    trackers: list[Tracker] = []
    """Experiment trackers that receive loss, learning rate, score and speed of each training, and nothing else."""
    on_version_change: Literal["warn", "strict"] = "warn"
    """Treatment of results from other library versions. warn: print a note. strict: compute them again."""


class ExperimentConfig(ConfigSection):
    """An experiment file: all sections with their defaults."""

    schema_version: Literal[2] = 2
    """Version of the file format."""
    corpus: Corpus = Corpus()
    labels: Text | None = None
    """File with gold labels of some training texts, which correct targets and teacher weights; null: none. Its columns
    are label, and key, id or text. corpus: the labels in the column corpus.label."""
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

    @property
    def has_catch_all(self) -> bool:
        """Returns whether a teacher has outputs that mean none of its labels."""
        return any(teacher.catch_all for teacher in self.teachers)

    @property
    def teacher_names(self) -> list[str]:
        """Returns the teachers in the order of the label union: trained teachers first."""
        groups = (self.train_teachers.groups or self.train_teachers.co_train or ()) if self.train_teachers else ()
        trained = [f"teacher-{number + 1}" for number in range(groups)] if isinstance(groups, int) else list(groups)
        return [*trained, *(teacher.name for teacher in self.teachers)]
