"""Resolves and loads a run's teachers, labels, encoders and texts for stages, which pass them on as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from amalgam.data.corpus import find_files
from amalgam.data.keys import LabelSpace, shown, union_of
from amalgam.data.lazy import np, pa
from amalgam.data.parquet import read_table
from amalgam.data.remote import fetch_remote, remote_name
from amalgam.data.tokens import TokenRows
from amalgam.pipeline.config.schema import STATIC, TEACHER, Student, TrainTeachers
from amalgam.pipeline.config.schema import Teacher as TeacherSection
from amalgam.pipeline.errors import DataError, ExperimentError, ModelError
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, once
from amalgam.pipeline.input_files import InputFile
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import StoredFile
from amalgam.pipeline.user_paths import readable
from amalgam.stages.common.corpus import (
    FETCHED,
    GENERATED,
    HELD_OUT,
    REMOTE,
    Bucket,
    CorpusFacts,
    FetchedFacts,
    Part,
    content_of,
    filters_of,
    generated_part,
    read_bucket,
    sources_of,
    texts_file,
    unit_name_of,
)
from amalgam.stages.common.deliveries import DeliveryServices
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.models import resolve as models
from amalgam.stages.common.models.label_names import catch_all_places, label_names, own_labels
from amalgam.stages.common.models.model_folder import position_limit
from amalgam.stages.common.token_cache import TokenCache, UnitTexts, tokenizer_digest
from amalgam.stages.objective_inputs import domain_measure, objective_inputs, reads_texts
from amalgam.stages.target_methods import target_method

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier
    from amalgam.stages.common.inference.teacher import TeacherLoader
    from amalgam.stages.common.training.run import TrainingServices


@once
def teachers_of(run: Run) -> list[models.ResolvedTeacher]:
    """Returns the teachers in the order of the label union: trained teachers first, then those of the file."""
    return [*_trained_teachers(run), *_named_teachers(run)]


def models_of(run: Run) -> list[models.ResolvedTeacher]:
    """Returns the teachers that are models, and no files of predictions."""
    return [teacher for teacher in teachers_of(run) if not teacher.files.are_predictions]


def known_labels(run: Run) -> list[list[object]]:
    """Returns the name and the labels of each teacher for identities: numbers by teacher are stored in their order."""
    return [
        [teacher.name, list(teacher.labels), *([teacher.places] if teacher.catch_all else [])]
        for teacher in teachers_of(run)
    ]


def label_space(run: Run) -> LabelSpace:
    """Returns the union of all teachers' labels, or the gold labels of a supervised student without teachers."""
    teachers = teachers_of(run)
    if teachers:
        return union_of({teacher.name: teacher.labels for teacher in teachers})
    corpus = run.experiment.corpus
    gold = corpus.labels or sorted(run.result("read-corpus").facts["parts"]["train"]["labels"])
    return LabelSpace(tuple(label for label in gold if label != corpus.unknown), {})


@once
def prepare_teachers(run: Run) -> None:
    """Resolves every model that the experiment names before any work starts; one error lists all missing models."""
    teachers = run.experiment.teachers
    files = models.resolve_all(teacher_reference(run, teacher) for teacher in teachers)
    named = {teacher.name: model for teacher, model in zip(teachers, files, strict=True)}
    for note in same_model_notes(named):
        run.console.note(note)


def same_model_notes(named: Mapping[str, models.ModelFiles]) -> Iterator[str]:
    for names in models.same_models(named):
        yield f"teachers {' and '.join(names)} are the same model"


def _named_teachers(run: Run) -> Iterable[models.ResolvedTeacher]:
    cache = run.experiment.cache
    for teacher in run.experiment.teachers:
        reference = teacher_reference(run, teacher)
        if models.needs_network(reference):
            raise PendingDependencyError(f"the download of {teacher.model}")
        files = models.resolve(reference)
        if files.are_predictions:
            _check_needs_no_model(run, teacher.name)
        outputs, catch_all = _outputs_of(run, teacher, files)
        dropout = cache.rate if teacher.dropout is None else teacher.dropout
        max_tokens = teacher.max_tokens or cache.max_tokens
        yield models.ResolvedTeacher(teacher.name, files, tuple(outputs), max_tokens, dropout, catch_all)


def _check_needs_no_model(run: Run, name: str) -> None:
    """Refuses a teacher that is a file of predictions where its model would have to run, or hidden states are read."""
    experiment, fix = run.experiment, "leave this teacher out, or name its model"
    reads_states = objective_inputs(experiment).states is not None or domain_measure(experiment) is not None
    if experiment.generate:
        why = "it has no predictions for generated texts"
    elif not reads_texts(experiment):
        why = "this method trains on pseudo embeddings, which only a model can predict"
    elif reads_states:
        why, fix = "this method reads its hidden states", "use student.method=amalgam; `amalgam methods` lists others"
    elif target_method(experiment.targets).compares_passes:
        why, fix = "it has no dropout passes", "set another measure, such as targets.uncertainty=entropy"
    elif experiment.cache.passes:
        why, fix = "it has no dropout passes", "set cache.passes: auto, which takes its prediction as every pass"
    else:
        return
    raise ModelError(f"teacher {name} is a file of predictions: {why}", where=f"teacher {name}", fix=fix)


def model_reference(run: Run, model: str, revision: str | None = None, *, where: str | None = None) -> models.Reference:
    return models.Reference(model, revision, run.base, run.store, run.digest_of, field=where)


def teacher_reference(run: Run, teacher: TeacherSection) -> models.Reference:
    reference = model_reference(run, teacher.model, teacher.revision, where=f"teacher {teacher.name}")
    return replace(
        reference,
        allow_pickle=teacher.allow_pickle,
        trust_remote_code=teacher.trust_remote_code,
        corpus=run.experiment.corpus,
        labels=teacher.labels,
    )


def labels_by_teacher(run: Run) -> dict[str, list[str]]:
    """Returns the labels of each teacher whose files are on this machine; reads no weights and sends no request."""
    teachers = {teacher.name: teacher for teacher in run.experiment.teachers}

    def labels_if_here(teacher: TeacherSection) -> list[str] | None:
        files = models.local_model(teacher_reference(run, teacher))
        return labels_of(run, teacher, files) if files else None

    labels = zip(teachers, models.for_all(labels_if_here, teachers.values(), cannot="be teachers"), strict=True)
    return {name: names for name, names in labels if names}


def unfetched_models(run: Run) -> list[str]:
    """Returns the names of models that are no folders here and would be fetched from the Hub, without `hub:` names.

    The default encoder is a Hub id. Another one counts if its parent is a folder here, or if a teacher has its name,
    or a folder a similar one.
    """
    named = {teacher.model: teacher_reference(run, teacher) for teacher in run.experiment.teachers}
    student = run.experiment.student
    encoder = _encoder_of(student)
    is_here = (run.base / encoder).parent.is_dir() if "/" in encoder else bool(models.folders_like(encoder, run.base))
    is_here |= encoder in run.experiment.teacher_names
    if student.learns and teacher_in(student) is None and is_here:
        named[encoder] = model_reference(run, encoder, student.revision)
    return [name for name, model in named.items() if not name.startswith("hub:") and models.needs_network(model)]


def labels_of(run: Run, teacher: TeacherSection, files: models.ModelFiles) -> list[str]:
    """Returns the labels of a teacher of the file, without those of catch_all."""
    outputs, catch_all = _outputs_of(run, teacher, files)
    return [name for place, name in enumerate(outputs) if place not in catch_all]


def _outputs_of(run: Run, teacher: TeacherSection, files: models.ModelFiles) -> tuple[list[str], frozenset[int]]:
    """Returns the names of the outputs, which may be numbers for the only teacher, and the places of catch_all."""
    only, rename = len(run.experiment.teacher_names) == 1, teacher.rename
    outputs = label_names(files, labels=teacher.labels, rename=rename, teacher=teacher.name, numbers=only)
    models.check_model_type(files)
    named = teacher.labels or own_labels(files, teacher=teacher.name)[0]
    return outputs, catch_all_places(files, named, teacher.catch_all, teacher=teacher.name)


def check_encoder(run: Run, settings: Student | TrainTeachers, where: str) -> None:
    """Refuses an encoder on this machine that cannot be loaded; a trained teacher is no model yet."""
    name = teacher_in(settings)
    references = [teacher_reference(run, teacher) for teacher in run.experiment.teachers if teacher.name == name]
    for model in references if name else [model_reference(run, _encoder_of(settings), settings.revision, where=where)]:
        if files := models.local_model(model):
            models.checked_encoder(files, getattr(settings, "layers", None))


def _trained_teachers(run: Run) -> Iterable[models.ResolvedTeacher]:
    settings = run.experiment.train_teachers
    if settings is None:
        return
    for name in run.result("train-teachers").facts["teachers"]:
        files = models.resolve(model_reference(run, str(run.store.verified_folder(trained_files(run, name)))))
        labels = label_names(files, labels=None, rename={}, teacher=name)
        yield models.ResolvedTeacher(name, files, tuple(labels), settings.max_tokens, run.experiment.cache.rate)


def trained_files(run: Run, name: str) -> list[StoredFile]:
    return [file for file in run.result("train-teachers").files if unit_name_of(file) == name]


def delivery_services(run: Run) -> DeliveryServices:
    return DeliveryServices(run.store, run.digest_of, run.console.note)


@once
def model_files(run: Run, model: str, revision: str | None, where: str) -> models.ModelFiles:
    """Returns the files of a named model; `where` is its field in the experiment."""
    return models.resolve(model_reference(run, model, revision, where=where))


def model_digest(run: Run, model: str, revision: str | None, where: str) -> str:
    """Returns the model's digest for an identity, without any request to the Hub."""
    if models.needs_network(model_reference(run, model, revision)):
        raise PendingDependencyError(f"the download of {model}")
    return model_files(run, model, revision, where).digest


class NamedModel(NamedTuple):
    """A model as a field of the experiment names it: the arguments of `model_files` and `model_digest`."""

    model: str
    revision: str | None
    where: str


def named_bases(run: Run) -> dict[str, NamedModel]:
    """Returns the encoders that `base` names, by teacher."""
    teachers = [teacher for teacher in run.experiment.teachers if teacher.base]
    return {each.name: NamedModel(str(each.base), None, f"base of teacher {each.name}") for each in teachers}


def bases_of(run: Run) -> dict[str, NamedModel]:
    """Returns the encoder that each teacher was fine-tuned from, or may have been; without those of co_train."""
    student, trained, bases = run.experiment.student, run.experiment.train_teachers, dict[str, NamedModel]()
    if teacher_in(student) is None:
        encoder = NamedModel(_encoder_of(student), student.revision, "student.encoder")
        bases |= dict.fromkeys((teacher.name for teacher in run.experiment.teachers), encoder)
    if trained and trained.encoder:
        encoder = NamedModel(trained.encoder, trained.revision, "train_teachers.encoder")
        bases |= dict.fromkeys(run.result("train-teachers").facts["teachers"], encoder)
    return bases | named_bases(run)


def encoder_files(run: Run, settings: Student | TrainTeachers, where: str) -> models.ModelFiles:
    """Returns the files of the named encoder; `teacher:NAME` means that teacher's body without its head."""
    name = teacher_in(settings)
    if name is not None:  # validation has checked that the teacher exists
        files = next(teacher.files for teacher in teachers_of(run) if teacher.name == name)
    else:
        files = model_files(run, _encoder_of(settings), settings.revision, where)
    return models.checked_encoder(files, getattr(settings, "layers", None))


def encoder_digest(run: Run, settings: Student | TrainTeachers, where: str) -> str:
    """Returns the encoder's digest for an identity, without any request to the Hub."""
    if teacher_in(settings) is not None:
        return encoder_files(run, settings, where).digest
    return model_digest(run, _encoder_of(settings), settings.revision, where)


def teacher_in(settings: Student | TrainTeachers) -> str | None:
    """Returns the teacher that `teacher:NAME` names as the encoder."""
    encoder = _encoder_of(settings)
    return encoder.removeprefix(TEACHER) if isinstance(settings, Student) and encoder.startswith(TEACHER) else None


def _encoder_of(settings: Student | TrainTeachers) -> str:
    """Returns the named encoder; of a static student the one whose token vectors it has."""
    return settings.encoder.removeprefix(STATIC) if isinstance(settings, Student) else str(settings.encoder)


@once
def _note_once(run: Run, text: str) -> None:
    """Prints a note on a model that several stages load."""
    run.console.note(text)


def load_new_classifier(
    run: Run, settings: Student | TrainTeachers, labels: Sequence[str], where: str
) -> models.NewClassifier:
    from amalgam.stages.common.models import loading

    files = encoder_files(run, settings, where)
    layers, dropout = (settings.layers, settings.dropout) if isinstance(settings, Student) else (None, None)
    tokenizer = loading.load_tokenizer(files)
    if isinstance(settings, Student) and settings.is_static:
        from amalgam.stages.common.models.static import static_classifier, token_vectors

        encoder = loading.new_student(files, labels=["one", "two"], layers=None, seed=0)
        device, tokens = pick_device(run.experiment.execution.device), loading.vocabulary_of(encoder, name=where)
        with run.console.steps("token vectors", tokens, "tokens") as show:
            vectors = token_vectors(encoder, tokenizer, tokens, device, lambda done: show(done, ""))
        model = static_classifier(vectors, labels=list(labels), seed=settings.seed, dropout=dropout)
    else:
        model = loading.new_student(files, labels=list(labels), layers=layers, seed=settings.seed, dropout=dropout)
    for remark in loading.check_tokens(model, tokenizer, name=where):
        _note_once(run, remark)
    digest = tokenizer_digest(tokenizer, files)
    limit = loading.token_limit(model.config, tokenizer, settings.max_tokens)
    if limit < min(settings.max_tokens, position_limit(model.config)):
        _note_once(run, f"{where}: its tokenizer truncates at {limit} tokens, below max_tokens: {settings.max_tokens}")
    has_two_types, pad_id = models.has_two_types(model.config), int(tokenizer.pad_token_id)
    return models.NewClassifier(model, tokenizer, digest, limit, has_two_types, pad_id)


def training_services(run: Run) -> TrainingServices:
    from amalgam.stages.common.training.run import TrainingServices

    execution = run.experiment.execution
    seconds, on_cpu = execution.training_checkpoint_seconds, execution.device == "cpu"
    return TrainingServices(run.console, run.signals, run.store.root, seconds, execution.trackers, on_cpu)


def tokenized_buckets(
    run: Run, part: Part, new: models.NewClassifier, columns: Sequence[str]
) -> Iterator[tuple[pa.Table, TokenRows]]:
    cache = token_cache(run, new)
    for bucket in part.buckets:
        yield read_bucket(run.store, bucket, columns), cache.tokens(bucket)


def token_cache(run: Run, new: models.NewClassifier) -> TokenCache:
    return TokenCache(run.store, run.console, new.tokenizer, new.tokenizer_digest, new.limit, new.types)


def part_of(run: Run, name: str) -> Part | None:
    manifest = run.result("read-corpus")
    corpus: CorpusFacts = manifest.facts
    facts = corpus["parts"].get(name)
    if facts is None:
        return None
    inside = {file.name: file for file in manifest.files if unit_name_of(file) == name}
    buckets = (Bucket(row["prefix"], row["rows"], row["keys_digest"], inside[row["file"]]) for row in facts["buckets"])
    return Part(name, facts, tuple(buckets))


def train_part(run: Run) -> Part:
    part = part_of(run, "train")
    if part is None:
        fix = "choose another method; `amalgam methods` lists them"
        raise ExperimentError("this experiment has no training texts", where="objective.name: as-dfd", fix=fix)
    return part


def generated_file(run: Run) -> StoredFile:
    """Raises PendingDependencyError before the texts are generated."""
    return texts_file(run.result("generate"))


def generated_texts(run: Run, part: str) -> pa.Table:
    """Returns the generated texts of a part that pass the filters."""
    if run.experiment.generate is None:
        raise AssertionError("no generated texts")  # their stages need none
    table = read_table(run.store.verified_path(generated_file(run)))
    texts, filters = generated_part(table, run.experiment.generate, part)
    return texts.filter(np.logical_and.reduce(list(filters.values())))


def generated_identity(run: Run) -> dict[str, object]:
    """Returns the identity of the generated texts with their filters."""
    return {"written": generated_file(run).sha256, "filters": filters_of(run.experiment)}


def reference_part(run: Run) -> Part:
    """Returns the part that statistics are fitted on: held-out generated texts, by default the training texts."""
    return part_of(run, HELD_OUT) or train_part(run)


def extra_parts(run: Run) -> list[Part]:
    """Returns the parts that teachers predict only for these statistics."""
    held_out = part_of(run, HELD_OUT) if domain_measure(run.experiment) else None
    return [held_out] if held_out else []


def part_identity(run: Run, part: str) -> list[str]:
    digests: list[str] = []
    for source in sources_of(run.experiment)[part]:
        if source == GENERATED:
            digests += [generated_file(run).sha256, fingerprint(filters_of(run.experiment))]
        elif source.startswith(REMOTE):
            if (digest := run.store.pinned("remote", source)) is None:
                raise PendingDependencyError(f"the download of {source}")
            digests.append(content_of(digest, source))
        else:
            digests += [content_of(file.sha256, file.path.name) for file in _own_files(run, source)]
    return sorted(digests)


@once
def _own_files(run: Run, source: str) -> tuple[InputFile, ...]:
    """Returns the files of a local source with their digests, the same for all readers in this run."""
    files = []
    for path in source_files(run, source):
        with readable(path, DataError):
            files.append(InputFile.of(path, run.digest_of))
    return tuple(files)


def source_files(run: Run, source: str) -> list[Path]:
    """Returns the local files of a source; errors name its field and line."""
    corpus, teachers, generate = run.experiment.corpus, run.experiment.train_teachers, run.experiment.generate
    fields = {f"corpus.{part}": getattr(corpus, part) for part in ("train", "validation", "test")}
    fields |= {"train_teachers.texts": teachers and teachers.texts, "generate.corpus": generate and generate.corpus}
    name = next((name for name, sources in fields.items() if source in (sources or ())), None)
    try:
        return find_files(source, run.base, () if name == "corpus.test" else corpus.test or ())
    except DataError as error:
        if name:
            error.where = f"{run.place_of(name)}: {error.where}"
        raise


def text_inputs(run: Run, sources: Iterable[str]) -> list[InputFile]:
    """Returns the files of the sources that are outside the workspace."""
    local = (source for source in sources if source != GENERATED and not source.startswith(REMOTE))
    return [file for source in local for file in _own_files(run, source)]


def local_files(run: Run, source: str) -> list[Path]:
    """Returns the files of a source; raises PendingDependencyError before it is generated or fetched."""
    if source == GENERATED:
        return [run.store.verified_path(generated_file(run))]
    if source.startswith(REMOTE):
        fetched = _fetched(run, source)
        if fetched is None:
            raise PendingDependencyError(f"the download of {source}")
        return [fetched]
    return [file.path for file in _own_files(run, source)]


def part_files(run: Run, part: str) -> list[Path]:
    """Returns the files of a part of the corpus, which may lack the part."""
    return [path for source in sources_of(run.experiment).get(part, []) for path in local_files(run, source)]


def fetch(run: Run, sources: Sequence[str]) -> None:
    """Downloads the remote sources that are not local yet, and pins their content."""
    for source in sources:
        if source.startswith(REMOTE) and _fetched(run, source) is None:
            run.console.say(f"read-corpus: fetching {source}")
            path = _fetched_record(run, source)
            with run.store.draft(path.parent, path.stem, remote_name(source).suffix.lower()) as draft:
                fetch_remote(source, draft.folder)
                draft.facts = FetchedFacts(source=source)
            record = run.store.record(path)
            if record is not None and run.store.pin("remote", source, record.files[0].sha256) != record.files[0].sha256:
                run.store.quarantine(path, run.store.path(record.files[0]))
                what = f"{shown(source, 200)} has other content than when this workspace first read it"
                fix = "restore its first content, or put the new content at a new address"
                raise DataError(what, where=run.store.where(path), fix=fix)


def _fetched(run: Run, source: str) -> Path | None:
    record = run.store.record(_fetched_record(run, source))
    if record is None or run.store.missing_files(record):
        return None
    return run.store.verified_path(record.files[0])


def _fetched_record(run: Run, source: str) -> Path:
    return run.store.folder("read-corpus", FETCHED) / f"{fingerprint(source)}.json"


@once
def teacher_loader(run: Run) -> TeacherLoader:
    from amalgam.stages.common.inference.teacher import TeacherLoader

    cache, execution = run.experiment.cache, run.experiment.execution
    return TeacherLoader(cache.seed, execution.device, execution.batch_tokens, run.console, cache.last_layer)


def load_student(run: Run, folder: Path, labels: Sequence[str], *, where: str) -> Classifier:
    """Loads a finished student whose logits follow these labels; refuses one with other labels."""
    from amalgam.stages.common.inference.batches import Classifier

    files = models.resolve(model_reference(run, str(folder.absolute()), where=where))
    device, limit = run.experiment.execution.device, run.experiment.student.max_tokens
    classifier = Classifier(files, device=device, max_tokens=limit)
    classifier.reorder(labels, where=where)
    return classifier


def unit_texts(run: Run, parts: Iterable[Part]) -> UnitTexts:
    buckets = {(part.name, bucket.prefix): bucket for part in parts for bucket in part.buckets}
    return UnitTexts(run.store, run.console, buckets, run.experiment.cache.on_long_text == "error")
