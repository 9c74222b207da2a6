"""Names the inputs of results for a reader: by the field of amalgam.yaml that sets them, else by plain words."""

from __future__ import annotations

import re

ENCODER, STATES = "model files of the encoder", "hidden states of the student's encoder"
PASSES = "number of dropout passes"

NAMES: dict[str, dict[str, str]] = {
    "read-corpus": {
        r"corpus\.id_type": "type of corpus.id",
        r"(train|validation|test)(\.\d+)?": r"content of corpus.\1",
        r"teachers(\.\d+)?": "content of train_teachers.texts",
        r"train_teachers": "train_teachers.texts",
        r"held-out(\.\d+)?": "generated texts that are held out",
    },
    "train-teachers": {r"groups(\..+)?": r"train_teachers.groups\1", r"texts": "labelled texts of the teachers"},
    "generate": {r"texts(\.\d+)?": "content of generate.corpus"},
    "cache-features": {
        r"features(\.feature)?": STATES,
        r"features\.content": ENCODER,
        r"features\.dtype": "cache.dtype",
        r"features\.max_tokens": "student.max_tokens",
        r"features\.(.+)": rf"{STATES}: \1",
        r"tokens_of": "tokens of the student's encoder",
        r"tokens_of\.0": ENCODER,
        r"tokens_of\.1": "student.max_tokens",
    },
    "fit-statistics": {r"reference_fraction": "targets.reference_fraction"},
    "build-targets": {r"labels(\.\d+)?": "label names", r"method_version": "code of targets.mode"},
    "train-student": {
        r"confidence": "targets.uncertainty",
        r"select": "student.select",
        r"static": "static student.encoder",
        r"validation": "content of corpus.validation",
        r"objective_version": "code of objective.name",
        r"excluded texts": "labelled texts that are not learned",
    },
    "report": {
        r"adaptive": "predictions of the teachers",
        r"labels(\..+)?": "labels",
        r"method": "student.method",
        r"picked": "test texts that were selected for labelling",
        r"test": "content of corpus.test",
        r"train": "training texts",
        r"unknown": "corpus.unknown",
        r"train\.gold": "gold labels of corpus.train",
        r"train\.columns": "columns of corpus.train",
        r"train\.columns\.(.+)": r"corpus.\1",
        r"train\.compared by": "comparison of the teachers",
        r"train\.compared by\.(.+)": r"targets.\1",
        r"train\.adaptive": "cache.adaptive",
        r"train\.passes": PASSES,
        r"zero-shot": "zero-shot baseline",
        r"zero-shot\.version": "code of the zero-shot baseline",
        r"zero-shot\.encoder": ENCODER,
        r"zero-shot\.max_tokens": "student.max_tokens",
    },
}
"""Stage -> regular expression of an input's path in the identity -> its name."""

OF_ANY_STAGE = {
    r"(amalgam|torch|transformers|tokenizers|polars)": r"version of \1",
    r"adaptive(\..+)?": "cache.adaptive",
    r"blocks(\.\d+)?": "blocks of training texts",
    r"catch_all": "teachers.catch_all",
    r"dtype": "cache.dtype",
    r"encoder(\..+)?": ENCODER,
    r"families": "predictions of the teachers",
    r"families\.(.+)": r"predictions of teacher \1",
    r"filters\.(.+)": r"generate.\1",
    r"given labels": "labels",
    r"gold": "gold labels of corpus.train",
    r"knows(\.\d+\.0)?": "teachers and their order",
    r"knows\.\d+(\..+)?": "labels of the teachers",
    r"knows\.(.+?)(\.\d+)*": r"labels of teacher \1",
    r"language_model": "generate.language_model",
    r"passes": PASSES,
    r"sample(\.texts)?": "sample of texts with dropout passes",
    r"sample\.passes": "dropout passes of the sample",
    r"texts": "training texts",
    r"texts\.train": "training texts",
    r"texts\.held-out": "generated texts that are held out",
    r"texts\.(test|validation)": r"\1 texts",
    r"written": "generated texts",
    r"(teachers|states)\.(.+)\.blocks": r"hidden layers of teacher \2 (0: the last)",
    r"(teachers|states)\..+\.dtype": "cache.dtype",
    r"(teachers|states)\..+\.passes": "cache.dropout",
    r"(teachers|states)\..+\.seed": "cache.seed",
    r"(teachers|states)\.(.+)\.states": r"kind of the hidden states of teacher \2",
    r"(teachers|states)\.(.+)\.content": r"model files of teacher \2",
    r"teachers\.(.+)\.(labels|of)(\..+)?": r"labels of teacher \1",
    r"(teachers|states)\.(.+)\.(max_tokens|dropout|pad|padding|attention)": r"\3 of teacher \2",
    r"states": "hidden states of the teachers",
    r"states\.(.+)": r"hidden states of teacher \1",
    r"teachers\.(.+)": r"teacher \1",
    r"version": "code of the stage",
}


def input_name(stage: str, path: str) -> str:
    """Returns the name of an input by its path in an identity; a path of a setting is the field itself."""
    inside = re.sub(r"^(config|inputs|libraries|upstream)\.", "", path)
    for pattern, name in [*NAMES.get(stage, {}).items(), *OF_ANY_STAGE.items()]:
        if match := re.fullmatch(pattern, inside):
            return match.expand(name)
    return inside
