"""Measures the scores of `predict --unknown` where some training texts have a label of no teacher.

python benchmarks/unknown_in_training.py [--folder choice-benchmark] [--only trec6] [--share 0.3 0.1 0] [--json]

Each teacher of a pool of choice.py is left out in turn, so its texts are unknown. Scores are fitted to two thirds of
the other texts, and so many unknown ones that they are --share of all. States are those of the encoder's middle layer,
instead of a student's. The scores are measured on the rest of the texts. Unknown ones are "near", and texts of another
data set are "far".

"all" fits to all texts, "clear" to those with more evidence, as train-student does. flagged and known_flagged are the
shares above the threshold.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amalgam.benchmarks.choice import amalgam
from amalgam.benchmarks.choice_pools import encoder_folder, unpacked
from amalgam.benchmarks.choice_settings import read_arrays, setting_from
from amalgam.benchmarks.protocol import row, show
from amalgam.data.tokens import encode
from amalgam.stages.common.inference.batches import predict_with_states
from amalgam.stages.common.models.unknown import UnknownStates
from amalgam.stages.report.quality import unknown_quality

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amalgam.benchmarks.choice_settings import Setting

Array = np.ndarray[Any, np.dtype[Any]]

LAYER, MAX_TOKENS = 3, 24
FIGURES = ("auroc", "flagged", "known_flagged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("choice-benchmark"), help="folder of benchmarks/choice.py")
    parser.add_argument("--only", nargs="+", default=[""], help="pools whose name contains one of these")
    parser.add_argument("--share", type=float, nargs="+", default=[0.3, 0.1, 0.0], help="of the texts that are fitted")
    parser.add_argument("--draws", type=int, default=2, help="draws of the texts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    paths = [path for path in sorted((options.folder / "pools").glob("*.npz")) if not path.stem.endswith("layers")]
    states = {path: _states(unpacked(read_arrays(path)["texts"])) for path in paths}
    rows = []
    for path in (path for path in paths if any(part in path.stem for part in options.only)):
        far = next((own for other, own in states.items() if _data(other) != _data(path)), None)
        for share in options.share:
            figures: dict[str, list[dict[str, float]]] = defaultdict(list)
            for setting in _settings(path):
                for draw in range(options.draws):
                    for name, own in _measured(setting, states[path], far, share, draw):
                        figures[name].append(own)
            for name, fits in figures.items():
                means = {figure: float(np.mean([each[figure] for each in fits])) for figure in FIGURES}
                rows.append(row("unknown-in-training", f"{path.stem} {share}: {name}", **means, fits=len(fits)))
    if not rows:
        raise SystemExit(f"{options.folder}/pools has no such pool: make some with `choice.py make`")
    show(rows, as_json=options.json)


def _data(path: Path) -> str:
    return path.stem.partition("-")[0]


def _states(texts: Sequence[str]) -> Array:
    """Returns the states of the encoder's middle layer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = encoder_folder()
    torch.manual_seed(0)  # of the head, which is not used
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = encode(tokenizer, [(text,) for text in texts], MAX_TOKENS, types=True)
    return predict_with_states(model, tokens.ids, pad_id=tokenizer.pad_token_id, layer=LAYER)[1].astype(float)


def _settings(path: Path) -> Iterator[Setting]:
    """Yields the settings that leave one teacher out."""
    arrays = read_arrays(path)
    teachers = range(len(unpacked(arrays["about"])["teachers"]))
    for left_out in teachers:
        own = [place for place in teachers if place != left_out]
        name = f"{path.stem} without {left_out + 1}"
        yield setting_from(name, path.stem, dict.fromkeys(own, arrays), dict.fromkeys(own, 0), unknown=True)


def _measured(
    setting: Setting, states: Array, far: Array | None, share: float, draw: int
) -> Iterator[tuple[str, dict[str, float]]]:
    random = np.random.default_rng(draw)
    others, unknown = (random.permutation(np.flatnonzero((setting.gold < 0) == own)) for own in (False, True))
    fitted, measured = others[: len(others) * 2 // 3], others[len(others) * 2 // 3 :]
    count = min(round(len(fitted) * share / (1 - share)), len(unknown) // 2)
    if count:
        fitted = fitted[: round(count * (1 - share) / share)]
    rows = np.sort(np.concatenate([fitted, unknown[:count]]))
    own = setting.take(rows, setting.name)
    signal, weights = own.estimated[0], amalgam(own)
    if signal is None:
        return
    predicted = own.answered[np.arange(len(rows)), weights.argmax(axis=1)]
    groups = np.unique(predicted, return_inverse=True)[1]
    new = {"near": states[unknown[count:]]} | ({} if far is None else {"far": far})
    for fit, evidence in {"all": None, "clear": signal.max(axis=1)}.items():
        scores = UnknownStates.of(states[rows], groups, evidence, layer=LAYER, weights="")
        usual = scores.scores(states[measured])
        for kind, texts in new.items():
            quality = unknown_quality(usual, scores.scores(texts), scores.threshold)
            flagged = quality["unknown_flagged"] / len(texts), quality["labelled_flagged"] / len(measured)
            yield f"{kind}, {fit}", dict(zip(FIGURES, (float(quality["auroc"] or 0), *flagged), strict=True))


if __name__ == "__main__":
    main()
