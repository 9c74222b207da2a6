"""Settings of benchmarks/choice.py: some teachers, texts whose labels they know, and the arrays to choose from.

A setting is a slice of a pool. Its file holds the evidence and the gold labels.
`load_settings` reads a folder of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.choice_pools import Pool, packed, unpacked, write_arrays
from amalgam.data.arrays import top_margin
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.methods import AMALGAM
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.neighbours import BlockSpace, compared
from amalgam.stages.weigh_teachers.signals import Params, with_absence
from amalgam.stages.weigh_teachers.weigh import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

LISTS = ("logits", "passes", "states", "moved")
"""Fields of a setting with an array for each teacher."""
ARRAYS = ("features", "similarity", "gold")
ABOUT = ("name", "pool", "labels", "teachers", "layers")
NEIGHBOURS = Targets.model_validate(AMALGAM).neighbours
COUNTS = {2: 3, 3: 2, 5: 1}
"""Number of teachers: settings of a pool that has more of them."""
THINNED = 4
"""One text in so many is kept."""
LEAST_TEXTS = 3
"""Least texts of a label that can be lost."""


@dataclass(frozen=True)
class Setting:
    name: str
    pool: str
    """Settings of one pool share texts and teachers."""
    labels: list[str]
    teachers: dict[str, list[int]]
    """The labels of each teacher, in the order of its logits, as places in `labels`."""
    layers: dict[str, int]
    """Layers of each teacher's encoder; 0: all."""
    logits: list[Array]
    """[texts, labels of the teacher], with dropout off."""
    passes: list[Array]
    """[texts, passes, labels of the teacher]."""
    states: list[Array]
    moved: list[Array]
    """How far the fine-tuning of the teacher moved the tokens of each text: [texts]."""
    features: Array
    similarity: Array
    """Cosine of the encoder's states of texts and label names: [texts, labels]."""
    gold: Array
    texts: list[str]

    # ---- the evidence

    @cached_property
    def answers(self) -> dict[str, Array]:
        """Returns confidence, margin and highest logit, as weigh-teachers reads them: [texts, teachers] each."""
        margin = [top_margin(own.astype(np.float64)) for own in self.logits]
        highest = [own.max(axis=1).astype(np.float64) for own in self.logits]
        confidence = [_confidence(own) for own in self.passes]
        columns = {"confidence": confidence, "margin": margin, "highest": highest}
        return {name: np.stack(own, axis=1) for name, own in columns.items()}

    @cached_property
    def names(self) -> Array:
        """Returns each text's similarity to each teacher's closest label name: [texts, teachers]."""
        return np.stack([self.similarity[:, own].max(axis=1) for own in self.columns], axis=1)

    @cached_property
    def evidence(self) -> Evidence:
        states = [own.astype(np.float32) for own in self.states]
        features = self.features.astype(np.float32)
        encoder, *teachers = (BlockSpace(space, space) for space in (features, *states))
        labels = len(self.labels)
        among = compared(encoder, teachers, teachers, labels, NEIGHBOURS)
        moved = np.stack(self.moved, axis=1)
        tokens = moved - moved.mean(axis=1, keepdims=True)
        kinds = weigh.kinds_of(list(self.answers.values()), among.relative, self.names, tokens, Params())
        kinds = with_absence(kinds, self.answered, Params())
        return Evidence(kinds, self.answered, labels, among.near, spaces=among.spaces)

    @cached_property
    def estimated(self) -> tuple[Array | None, Array | None]:
        """Returns the scaled evidence, and the teachers' shares; None where the kinds do not agree."""
        return weigh.joint_signal(self.evidence, Params())

    @cached_property
    def answered(self) -> Array:
        """Returns the label that each teacher predicts, as a place in `labels`: [texts, teachers]."""
        columns = [np.array(own)[logits.argmax(axis=1)] for own, logits in zip(self.columns, self.logits, strict=True)]
        return np.stack(columns, axis=1)

    @property
    def columns(self) -> list[list[int]]:
        return list(self.teachers.values())

    # ---- the measurement

    @cached_property
    def has_gold(self) -> Array:
        """Returns whether each teacher has each text's gold label: [texts, teachers]."""
        return np.stack([np.isin(self.gold, own) for own in self.columns], axis=1)

    @cached_property
    def shares(self) -> Array:
        """Returns the teachers' true shares of the texts; teachers that share a label share its texts."""
        return (self.has_gold / self.has_gold.sum(axis=1, keepdims=True)).mean(axis=0)

    def right(self, weights: Array) -> float:
        """Returns the share of texts whose most heavily weighted teacher has the gold label."""
        return float(self.has_gold[np.arange(len(weights)), weights.argmax(axis=1)].mean())

    def labelled(self, weights: Array) -> float:
        """Returns the share of texts whose most heavily weighted teacher predicts the gold label."""
        return float((self.answered[np.arange(len(weights)), weights.argmax(axis=1)] == self.gold).mean())

    def lost(self, weights: Array) -> float:
        """Returns the share of labels for which most of their own texts get a teacher without the label.

        A student can outvote errors of single texts, but it never learns such a label.
        """
        is_right = self.has_gold[np.arange(len(weights)), weights.argmax(axis=1)]
        right, texts = np.bincount(self.gold, is_right), np.bincount(self.gold)
        is_judged = texts >= LEAST_TEXTS
        return float((right[is_judged] < texts[is_judged] / 2).mean())

    # ---- variants

    def take(self, rows: Array, name: str) -> Setting:
        """Returns the setting with these texts alone."""
        parts: dict[str, Any] = {name: [own[rows] for own in getattr(self, name)] for name in LISTS}
        parts |= {name: getattr(self, name)[rows] for name in ARRAYS}
        return replace(self, name=name, texts=[self.texts[row] for row in rows], **parts)

    def thinned(self, seed: int = 0) -> Iterator[Setting]:
        """Yields, for each teacher, the setting with a quarter of its texts, and that with a quarter of the others'.

        With two teachers both are the same, and each comes once.
        """
        kept = np.random.default_rng(seed).random(len(self.gold)) < 1 / THINNED
        first = self.has_gold.argmax(axis=1)
        for place, teacher in enumerate(self.teachers):
            own = first == place
            yield self.take(np.flatnonzero(~own | kept), f"{self.name} 1:{THINNED} {teacher}")
            if len(self.teachers) > 2:
                yield self.take(np.flatnonzero(own | kept), f"{self.name} {THINNED}:1 {teacher}")


def _confidence(passes: Array) -> Array:
    """Returns MUKA's confidence from passes [texts, passes, labels], as cached.read computes it."""
    import polars as pl

    from amalgam.stages.common.cached.uncertainty import MEASURES, confidence, sums_over_passes

    count, measure = passes.shape[1], MEASURES["entropy"]
    sums = pl.DataFrame(sums_over_passes(passes.reshape(len(passes), -1), count, measure))
    return confidence(sums, measure).to_numpy()


# ---- from pools


def settings_of(folder: Path, pool: Pool) -> Iterator[Setting]:
    """Yields the settings of a pool. Teachers of a shallow pool are joined with those of the whole encoder's pool."""
    whole = read_arrays(folder / "pools" / f"{replace(pool, layers=0).name}.npz")
    shallow = read_arrays(folder / "pools" / f"{pool.name}.npz") if pool.layers else whole
    random = np.random.default_rng([pool.draw, pool.groups, 1])
    for places in _subsets(pool.groups, random):
        from_shallow = set(random.permutation(places)[: len(places) // 2].tolist()) if pool.layers else set()
        sources = {place: shallow if place in from_shallow else whole for place in places}
        layers = {place: pool.layers if place in from_shallow else 0 for place in places}
        kind = "-unlike" if pool.layers else ""
        name = f"{replace(pool, layers=0).name}{kind}-t{'.'.join(str(place + 1) for place in places)}"
        yield setting_from(name, replace(pool, layers=0).name, sources, layers)


def _subsets(groups: int, random: np.random.Generator) -> Iterator[tuple[int, ...]]:
    for count in sorted({*COUNTS, groups}):
        subsets = list(combinations(range(groups), count))
        most = 1 if count == groups else COUNTS.get(count, 1)
        for place in sorted(random.permutation(len(subsets))[:most]):
            yield subsets[place]


def read_arrays(path: Path) -> dict[str, Array]:
    with np.load(path) as arrays:
        return dict(arrays)


def setting_from(
    name: str, pool: str, sources: dict[int, dict[str, Array]], layers: dict[int, int], *, unknown: bool = False
) -> Setting:
    """Returns the setting of these teachers; `sources` are the arrays of each teacher's pool, by its place there.

    With `unknown` it has all texts of the pool; those whose label is in no teacher have the gold label -1.
    """
    first, about = next(iter(sources.values())), {place: unpacked(own["about"]) for place, own in sources.items()}
    labels = next(iter(about.values()))["labels"]
    own = {place: list(about[place]["teachers"].values())[place] for place in sources}
    names = {place: list(about[place]["teachers"])[place] for place in sources}
    wanted = sorted({label for part in own.values() for label in part})
    is_known = np.isin(first["gold"], wanted)
    rows = np.flatnonzero(is_known | unknown)
    if any(not np.array_equal(arrays["texts"], first["texts"]) for arrays in sources.values()):
        raise AssertionError(f"{name}: the pools have different texts")
    texts = unpacked(first["texts"])
    return Setting(
        name=name,
        pool=pool,
        labels=[labels[label] for label in wanted],
        teachers={names[place]: [wanted.index(label) for label in part] for place, part in own.items()},
        layers={names[place]: count for place, count in layers.items()},
        logits=[arrays[f"logits_{place}"][rows] for place, arrays in sources.items()],
        passes=[arrays[f"passes_{place}"][rows] for place, arrays in sources.items()],
        states=[arrays[f"states_{place}"][rows] for place, arrays in sources.items()],
        moved=[arrays[f"moved_{place}"][rows] for place, arrays in sources.items()],
        features=first["features"][rows],
        similarity=first["similarity"][np.ix_(rows, wanted)],
        gold=np.where(is_known[rows], np.searchsorted(wanted, first["gold"][rows]), -1),
        texts=[texts[row] for row in rows],
    )


# ---- files


def write_setting(setting: Setting, path: Path) -> None:
    """Writes all fields of a setting."""
    arrays = {name: getattr(setting, name) for name in ARRAYS} | {"texts": packed(setting.texts)}
    for name in LISTS:
        arrays |= {f"{name}_{place}": own for place, own in enumerate(getattr(setting, name))}
    write_arrays(path, {**arrays, "about": packed({name: getattr(setting, name) for name in ABOUT})})


def load_setting(path: Path) -> Setting:
    arrays = read_arrays(path)
    about = unpacked(arrays["about"])
    lists: dict[str, Any] = {
        name: [arrays[f"{name}_{place}"] for place in range(len(about["teachers"]))] for name in LISTS
    }
    fields: dict[str, Any] = {name: about[name] for name in ABOUT} | {name: arrays[name] for name in ARRAYS}
    return Setting(**fields, **lists, texts=unpacked(arrays["texts"]))


def load_settings(folder: Path, names: Sequence[str] = ()) -> Iterator[Setting]:
    """Yields the settings of a folder whose name contains one of `names`, or all of them, sorted by name."""
    for path in sorted((folder / "settings").glob("*.npz")):
        if not path.stem.endswith(".draft") and (not names or any(name in path.stem for name in names)):
            yield load_setting(path)
