"""Names, for a reader, of the inputs that several stages' identities share."""

from __future__ import annotations

ENCODER, PASSES = "model files of the encoder", "number of dropout passes"

INPUT_NAMES = {
    r"(amalgam|torch|transformers|tokenizers|polars)": r"version of \1",
    r"adaptive(\..+)?": "cache.adaptive",
    r"bases": "encoders that the teachers were fine-tuned from",
    r"bases\.(.+)": r"base of teacher \1",
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
    r"knows\.(.+)": r"labels of teacher \1",
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
"""Regular expression of an input's path in an identity -> its name; see `Stage.input_names`."""
