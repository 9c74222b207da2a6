"""Answers as columns: logits, raw passes and what the passes say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amalgam.data.schemas import CACHE_LOGITS, CACHE_PASSES, CACHE_TEXTS, arrow_schema

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from amalgam.data.tokens import TokenRows


if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def answer_table(keys: list[bytes], tokens: TokenRows, logits: Array | None, passes: Array) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, Any] = {
        "key": pa.array(keys, pa.binary(16)),
        "tokens": pa.array(tokens.lengths, pa.int32()),
        "cut": pa.array(tokens.cut),
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

    from amalgam.stages.common.answers.statistics import statistics

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
