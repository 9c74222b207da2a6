"""Compares exact steered sampling with full scoring: tokens, teacher evaluations per token, texts per second.

python benchmarks/generate.py --language-model LM --teacher TEACHER [--steer 0.5 1 2 5 10] [--json]

LM is the output of benchmarks/train_lm.py; TEACHER is the folder of a fine-tuned classifier. Evaluations are
counted on --texts texts of --tokens tokens. Full scoring is too slow for them, so both methods are timed on
--timed-texts of --timed-tokens, interleaved.
`same at n` is the share of exact tokens among the n candidates of `generate.max_scored: n`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from amalgam.benchmarks.protocol import interleaved, median, paired, peak_rss_mb, row, show, spread
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models.loading import token_limit
from amalgam.stages.generate.decoding import (
    GeneratedText,
    LazySampler,
    SamplingParams,
    Scorer,
    SteeringParams,
    TextRequest,
    Writer,
    key64,
)
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.stages.generate.texts import STEERED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Texts = Mapping[tuple[int, int], GeneratedText]

FAST = (2, 4, 8, 16, 32)


class ExhaustiveSampler(LazySampler):
    """Scores every candidate: the reference of the lazy sampler, in tests too."""

    def pending(self) -> NDArray[np.int64]:
        return self.order[self.scored :] if self.strength else self.order[:0]


class CountingSampler(LazySampler):
    """Counts candidates, and how often scoring only the first ones would choose the same token."""

    tokens: ClassVar[int] = 0
    candidates: ClassVar[int] = 0
    same: ClassVar[dict[int, int]] = {}

    def near_ties(self) -> NDArray[np.int64]:
        CountingSampler.tokens += 1
        CountingSampler.candidates += len(self.order)
        for most in self.same:
            self.same[most] += self.winner in self.order[:most]
        return super().near_ties()


@dataclass(frozen=True)
class Bench:
    model: LanguageModel
    teacher: Teacher
    sampling: SamplingParams

    def orders(self, texts: int) -> list[TextRequest]:
        """Returns requests with equally many texts per class."""
        labels = range(self.teacher.labels)
        numbers = range(max(1, texts // len(labels)))
        return [
            TextRequest((label, index), key64(0, label, index), label, sampling=self.sampling)
            for index in numbers
            for label in labels
        ]

    def write(
        self, texts: int, steering: SteeringParams, sampler: type[LazySampler] = LazySampler
    ) -> tuple[Texts, Scorer]:
        """Generates texts with a new scorer, which has no cached scores."""
        scorer = Scorer(self.teacher)
        writer = Writer(self.model, scorer, steering, sampler=sampler)
        return dict(writer.write(self.orders(texts))), scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--language-model", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--steer", type=float, nargs="+", default=[0.5, 1.0, 2.0, 5.0, 10.0])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--timed-texts", type=int, default=4)
    parser.add_argument("--timed-tokens", type=int, default=8)
    parser.add_argument("--timed-steer", type=float, nargs="*", default=[1.0, 2.0])
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = prepared(options)
    rows = [figures for steer in options.steer for figures in measured(bench, steer, options)]
    show(rows, as_json=options.json)


def measured(bench: Bench, steer: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    seconds = timed(bench, steer, options) if steer in options.timed_steer else {}
    CountingSampler.tokens, CountingSampler.candidates, CountingSampler.same = 0, 0, dict.fromkeys(FAST, 0)
    texts, scorer = bench.write(options.texts, SteeringParams(steer, options.tokens), CountingSampler)
    figures = counted(list(texts.values()))
    settings = {"steer": steer, "teacher_classes": bench.teacher.labels}
    tokens = figures.pop("tokens")
    candidates = CountingSampler.candidates
    lazy = {"evaluations_per_token": figures["scored"] / tokens, "fewer": candidates / figures["scored"]}
    same = {f"same_at_{most}": round(count / CountingSampler.tokens, 4) for most, count in CountingSampler.same.items()}
    more = {"texts": len(texts), "tokens_per_text": tokens / len(texts), "computed_per_token": scorer.computed / tokens}
    speed = {
        name: {"texts_per_s": len(bench.orders(options.timed_texts)) / median(runs), "spread": spread(runs)}
        for name, runs in seconds.items()
    }
    faster = {"faster_than_naive": paired(seconds["naive"], seconds["amalgam"])} if seconds else {}
    quality = {"class_probability": figures["class_probability"], "peak_rss_mb": round(peak_rss_mb())}
    naive = {"evaluations_per_token": candidates / tokens, **speed.get("naive", {})}
    return [
        row("generate", "naive", **settings, **rounded(naive)),
        row(
            "generate",
            "amalgam",
            **settings,
            **rounded({**lazy, **speed.get("amalgam", {}), **faster, **more, **quality}),
            **same,
        ),
    ]


def timed(bench: Bench, steer: float, options: argparse.Namespace) -> dict[str, list[float]]:
    """Checks that both methods generate equal tokens, then times them."""
    samplers: dict[str, type[LazySampler]] = {
        "naive": ExhaustiveSampler,
        "amalgam": LazySampler,
    }
    steering = SteeringParams(steer, options.timed_tokens)
    naive, lazy = (bench.write(options.timed_texts, steering, sampler)[0] for sampler in samplers.values())
    if any(naive[tag].choices != lazy[tag].choices for tag in naive):
        raise SystemExit(f"steer {steer}: exact sampling and full scoring generate different tokens")

    def run(sampler: type[LazySampler]) -> None:
        bench.write(options.timed_texts, steering, sampler)

    return interleaved({name: partial(run, sampler) for name, sampler in samplers.items()}, options.repeats)


def counted(texts: Sequence[GeneratedText]) -> dict[str, float]:
    probabilities = [text.probability for text in texts if text.probability is not None]
    return {
        "tokens": sum(text.tokens for text in texts),
        "scored": sum(text.scored for text in texts),
        "class_probability": sum(probabilities) / len(probabilities),
    }


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) if value < 1000 else round(value) for name, value in figures.items()}


def prepared(options: argparse.Namespace) -> Bench:
    device = pick_device(options.device)
    model, tokenizer = loaded(options.language_model, "AutoModelForCausalLM")
    longest = options.tokens + 1
    language_model = LanguageModel(model, tokenizer, slots=STEERED[device.type], longest=longest, device=device)
    classifier, classifier_tokenizer = loaded(options.teacher, "AutoModelForSequenceClassification")
    limit = token_limit(classifier.config, classifier_tokenizer, 128)
    teacher = Teacher(classifier, classifier_tokenizer, digest="benchmark", seed=0, limit=limit, device=device)
    return Bench(language_model, teacher, SamplingParams(1.0, None, options.top_p, options.candidates))


def loaded(folder: Path, kind: str) -> tuple[Any, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    model = getattr(transformers, kind).from_pretrained(folder, **options)
    return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


if __name__ == "__main__":
    main()
