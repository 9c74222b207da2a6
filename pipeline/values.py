"""What the sections of an experiment file are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

SAFE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Section(BaseModel):
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
