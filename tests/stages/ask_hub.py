"""Answers questions about models from the environment's Hub: `python -m amalgam.tests.stages.ask_hub QUESTIONS`.

Questions and answers are JSON; an answer of a refusal is its what, where and fix.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.models import resolve as model_files


def reference(given: str, revision: str | None = None, where: str | None = None) -> model_files.Reference:
    return model_files.Reference(given, revision, Path(), Store(Path("workspace")), file_digest, field=where)


def answer(question: dict[str, Any]) -> Any:
    function = getattr(model_files, question.pop("function"))
    try:
        if "references" in question:
            return len(function([reference(**one) for one in question["references"]]))
        result = function(reference(**question))
    except AmalgamError as error:
        return {"what": error.what, "where": error.where, "fix": error.fix}
    if isinstance(result, model_files.ModelFiles):
        return {"commit": result.commit, "digest": result.digest, "folder": str(result.folder)}
    return result


if __name__ == "__main__":
    warnings.simplefilter("error")
    answers = [answer(question) for question in json.loads(sys.argv[1])]
    assert not {"torch", "transformers", "polars"} & set(sys.modules)
    print(json.dumps(answers))  # noqa: T201
