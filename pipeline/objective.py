"""Sections of the experiment file: what a student learns beside its targets, and what as-dfd puts in texts' place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from amalgam.pipeline.values import Positive, Section, Seed


class Objective(Section):
    """What the student learns of the teachers' hidden states, beside its targets; `student.method` sets the name."""

    name: Literal["targets", "layerwise", "dfa", "cfl", "mt-bert", "stratanet", "as-dfd"] = "targets"
    """targets: the targets alone. layerwise: Shen et al. 2019. dfa: its amalgamated states as a guide beside the
    targets. cfl: Luo et al. 2019. mt-bert: Wu et al. 2021, each teacher's states as a guide through maps of its own.
    stratanet: Vijayaraghavan et al. 2024, amalgamated by how foreign a text is to each teacher. as-dfd: Ma et al. 2020,
    from pseudo embeddings and no text."""
    grain: Literal["pooled", "tokens"] = "pooled"
    """Of the teachers' states: the mean over a text's tokens, or each token's, where all tokenise like the student."""
    blocks: Positive | None = None
    """Each teacher's layers are averaged in so many shares; null: as many as the student has layers."""
    amalgamation: Literal["dfa", "ifa"] = "dfa"
    """layerwise: the teachers' states are squeezed together all at once, or two at a time."""
    adaption: bool = True
    """layerwise: a linear map (FAM) stands between the amalgamated states and the student's layers."""
    learning: Literal["layer-wise", "joint", "both"] = "both"
    """layerwise: layer by layer from the amalgamated states, or end to end from the targets, or one after the other."""
    weights: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=3, max_length=3)] | None = None
    """Of the targets, of the states and of the states' reconstruction; null: the method's own."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Of the maps that an objective adds: they start from nothing, and stay behind."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """stratanet: the states' share of the loss; the targets have the rest."""
    strata: Literal["st", "multiply", "no-st"] = "st"
    """stratanet: a Transformer layer over the teachers' states, confidences added to them or multiplied with them; or
    none, a linear map of their weighted sum."""

    @property
    def states(self) -> Literal["pooled", "tokens"] | None:
        """The grain of the teachers' states that are looked at, if any."""
        if self.name in {"targets", "as-dfd"} or (self.name == "layerwise" and self.learning == "joint"):
            return None
        return self.grain

    @property
    def read(self) -> set[str]:
        """The fields that this objective reads: others change nothing."""
        if self.name == "targets":
            return set()
        if self.name == "as-dfd":
            return {"name"}
        if self.name == "stratanet":
            return {"name", "blocks", "alpha", "strata", "learning_rate"}
        if self.name != "layerwise":
            return {"name", "grain", "blocks", "weights", "learning_rate"}
        states = {"grain", "amalgamation", "adaption", "weights", "learning_rate"} if self.states else set()
        return {"name", "learning"} | states


class Embeddings(Section):
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
