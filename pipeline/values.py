"""The kinds of values that the sections of an experiment file are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

SAFE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Name = Annotated[str, StringConstraints(pattern=SAFE_NAME)]
Text = Annotated[str, StringConstraints(min_length=1, strict=True)]
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""As Accelerate names them."""


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
