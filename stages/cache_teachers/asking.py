"""One unit of stage 1: texts in, a table of logits, raw passes and their statistics out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amalgam.pipeline.errors import DataError
from amalgam.pipeline.stage import Run
from amalgam.stages.cache_teachers.family import Ask
from amalgam.stages.teachers import KnownTeacher

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from amalgam.data.tokens import Tokens
    from amalgam.stages.cache_teachers.teacher import Teacher

    Array = np.ndarray[Any, Any]


def ask_teacher(run: Run, known: KnownTeacher, ask: Ask, dtype: str) -> tuple[pa.Table, dict[str, Any]]:
    from amalgam.stages.cache_teachers.launches import run_passes
    from amalgam.stages.cache_teachers.stage import bucket_of
    from amalgam.stages.read_corpus.parts import fields

    teacher = loaded_teacher(run, known, dtype, passes=ask.last)
    rows = bucket_of(run, ask).take(ask.rows)
    keys = rows.column("key").to_pylist()
    tokens = teacher.tokenise(fields(rows))
    cut = sum(token.cut for token in tokens)
    if cut and run.experiment.cache.on_long == "error":
        _refuse_long(rows, tokens, known)
    logits, passes = run_passes(
        teacher,
        tokens,
        keys,
        range(ask.first, ask.last),
        deterministic=ask.logits,
        batch_tokens=run.experiment.execution.batch_tokens,
        on_progress=run.console.advance,
        stop=run.signals.check,
    )
    facts = {
        "prefix": ask.prefix,
        "logits": ask.logits,
        "first": ask.first,
        "last": ask.last,
        "rows": len(keys),
        "cut": cut,
        "tokens": sum(len(token.ids) for token in tokens),
        "device": str(teacher.device),
        "halved_launches": teacher.halved,
    }
    return _table(keys, tokens, logits, passes), facts


def loaded_teacher(run: Run, known: KnownTeacher, dtype: str, *, passes: int) -> Teacher:
    """One teacher is in memory at a time; units come teacher by teacher."""
    from amalgam.stages.cache_teachers.hardware import pick_device
    from amalgam.stages.cache_teachers.teacher import Teacher
    from amalgam.stages.models.loading import load_classifier, load_tokenizer, token_limit

    name, teacher = run.memory.get("loaded teacher", (None, None))
    if name != known.name:
        run.memory.pop("loaded teacher", None)
        model = load_classifier(
            known.files,
            dropout=known.dropout,
            dtype=dtype,
            trust_remote_code=known.trust_remote_code,
            allow_pickle=known.allow_pickle,
            labels=len(known.labels),
        )
        tokenizer = load_tokenizer(known.files, trust_remote_code=known.trust_remote_code)
        limit = token_limit(model.config, tokenizer, known.max_tokens)
        teacher = Teacher(
            model,
            tokenizer,
            name=known.name,
            digest=known.files.digest,
            seed=run.experiment.cache.seed,
            limit=limit,
            device=pick_device(run.experiment.execution.device),
        )
        run.memory["loaded teacher"] = (known.name, teacher)
        for note in teacher.notes:
            run.console.note(note)
        run.memory.pop("alive", None)
    if passes and run.memory.get("alive") != known.name:
        teacher.check_dropout_is_alive()
        run.memory["alive"] = known.name
    found: Teacher = teacher
    return found


def _refuse_long(rows: pa.Table, tokens: list[Tokens], known: KnownTeacher) -> None:
    from amalgam.data.keys import shown

    first = next(index for index, token in enumerate(tokens) if token.cut)
    raise DataError(
        f"{sum(token.cut for token in tokens)} texts are longer than {known.max_tokens} tokens of teacher {known.name}",
        where=f"the first: {shown(rows.column('text')[first].as_py())}",
        fix="cache.on_long=truncate cuts and counts them, or raise cache.max_tokens",
    )


def _table(keys: list[bytes], tokens: list[Tokens], logits: Array | None, passes: Array) -> pa.Table:
    import pyarrow as pa

    from amalgam.data.schemas import CACHE_LOGITS, CACHE_PASSES, CACHE_TEXTS, arrow_schema

    columns: dict[str, Any] = {
        "key": pa.array(keys, pa.binary(16)),
        "tokens": pa.array([len(token.ids) for token in tokens], pa.int32()),
        "cut": pa.array([token.cut for token in tokens]),
    }
    sizes: dict[str, int] = {}
    schema = list(CACHE_TEXTS)
    if logits is not None:
        sizes["logits"] = logits.shape[1]
        columns["logits"] = _arrays(logits, pa.float32())
        schema += CACHE_LOGITS
    if passes.shape[1]:
        sizes |= {"passes": passes.shape[1] * passes.shape[2], "mean_probability": passes.shape[2]}
        columns |= _pass_columns(passes)
        schema += CACHE_PASSES
    return pa.table(columns, schema=arrow_schema(schema, sizes))


def _pass_columns(passes: Array) -> dict[str, Any]:
    import numpy as np
    import pyarrow as pa

    from amalgam.stages.cache_teachers.statistics import statistics

    found = statistics(passes)
    return {
        "passes": _arrays(passes.reshape(len(passes), -1), pa.float16()),
        "mean_probability": _arrays(found.mean_probability, pa.float32()),
        "entropy_nats": pa.array(found.entropy_nats.astype(np.float32)),
        "confidence": pa.array(found.confidence.astype(np.float32)),
        "confidence_se": pa.array(found.confidence_se.astype(np.float32), from_pandas=True),
    }


def _arrays(values: Array, dtype: Any) -> pa.Array:
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), dtype), values.shape[1])
