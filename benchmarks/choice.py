"""Compares estimators of the right teacher, without labels, on many settings whose gold labels are present.

python benchmarks/choice.py make --data PATH [PATH] --sets trec6 banking77 [--draws 3] [--json]
python benchmarks/choice.py table [--estimators muka amalgam my/file.py:function] [--each] [--json]
python benchmarks/choice.py accuracy

`make` trains teachers on half of the labelled texts, and writes one file per setting with the evidence on the others.
An interrupted run resumes. `table` measures each setting as it is and thinned to a quarter of one teacher's texts, or
of the others'. An estimator is a function of a Setting that returns weights [texts, teachers].

right is the share of texts whose most heavily weighted teacher has the gold label. labels is the share for which this
teacher predicts it. lost is the share of labels most of whose texts get another teacher. loss is the largest loss in
one setting against the best of muka, ensemble and standardised. within is half of the 95 % interval of the mean over
these data sets, by a bootstrap over pools. Settings of a pool share texts and teachers. seconds is CPU time per
setting, with the signal.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks import estimates
from amalgam.benchmarks.choice_pools import Sizes, pools_of, write_pool
from amalgam.benchmarks.choice_settings import Setting, load_settings, settings_of, write_setting
from amalgam.benchmarks.protocol import row, show
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.methods import AMALGAM
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.mixture import mixture, standardised_weights
from amalgam.stages.weigh_teachers.signals import Params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Array = np.ndarray[Any, np.dtype[Any]]

RIVALS = ("muka", "ensemble", "standardised")
BOOTSTRAPS = 2000


# ---- estimators


def muka(setting: Setting) -> Array:
    return setting.answers["confidence"]


def ensemble(setting: Setting) -> Array:
    """Returns the highest logits: the ensemble's label is that of the highest."""
    return setting.answers["highest"]


def standardised(setting: Setting) -> Array:
    """Returns the weights of `targets.teacher_weights: standardised`."""
    signal = setting.estimated[0]
    return muka(setting) if signal is None else standardised_weights(signal, Params())


def amalgam(setting: Setting) -> Array:
    """Returns the weights of `method: amalgam`."""
    return with_confirmed(setting)[0]


def with_confirmed(setting: Setting) -> tuple[Array, float]:
    """Returns the weights of `method: amalgam`, and the share of the targets that its best linear map confirms."""
    targets, (signal, shares) = Targets.model_validate(AMALGAM), setting.estimated
    if signal is None:
        return weigh.by_confidence(setting.answers["confidence"], setting.answered, targets), 0.0
    signal, confirmed = weigh.with_maps(signal, setting.evidence, Params())
    return weigh.weigh(signal, targets, shares, Params())[0], float(confirmed.mean(axis=0).max())


def without_maps(setting: Setting) -> Array:
    """Returns the weights of the evidence alone."""
    signal = setting.estimated[0]
    return muka(setting) if signal is None else signal


def true_shares(setting: Setting) -> Array:
    """Returns the mixture over the scaled evidence with the true shares."""
    signal = setting.estimated[0]
    return muka(setting) if signal is None else mixture(signal, setting.shares, Params())[0]


def counted_shares(setting: Setting) -> Array:
    """Returns the mixture over the scaled evidence, with the shares of the highest values."""
    signal, shares = setting.estimated
    return muka(setting) if signal is None else mixture(signal, shares, Params())[0]


def dawid_skene(setting: Setting) -> Array:
    """Returns the probability of each teacher's labels by the teachers' answers alone."""
    labels = estimates.dawid_skene(setting.answered, len(setting.labels))
    return np.stack([labels[:, own].sum(axis=1) for own in setting.columns], axis=1)


def oracle(setting: Setting) -> Array:
    """Returns 1 for the teachers that have the gold label."""
    return setting.has_gold.astype(np.float64)


ESTIMATORS: dict[str, Callable[[Setting], Array]] = {
    "muka": muka,
    "ensemble": ensemble,
    "standardised": standardised,
    "dawid-skene": dawid_skene,
    "amalgam": amalgam,
    "without-maps": without_maps,
    "counted-shares": counted_shares,
    "true-shares": true_shares,
    "oracle": oracle,
}


def estimators_of(names: Sequence[str]) -> dict[str, Callable[[Setting], Array]]:
    """Returns the estimators by name; module:function or path.py:function names one of another file."""
    return {name.rpartition(":")[2]: _imported(name) if ":" in name else _known(name) for name in names}


def _known(name: str) -> Callable[[Setting], Array]:
    if name not in ESTIMATORS:
        raise SystemExit(f"no estimator is named {name}: use {', '.join(ESTIMATORS)}, or module:function")
    return ESTIMATORS[name]


def _imported(name: str) -> Callable[[Setting], Array]:
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise SystemExit(f"{place} is no Python file: name path.py:function")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, function)


# ---- commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("make", help="train the teachers and write the settings")
    make.set_defaults(run=_make)
    make.add_argument("--data", type=Path, nargs="+", required=True, help="folders of data sets: NAME/train.parquet")
    make.add_argument("--sets", nargs="+", required=True, help="data sets, in the order of computation")
    make.add_argument("--draws", type=int, default=3, help="draws of the labels' groups, halves and teachers")
    make.add_argument("--teacher-texts", type=int, default=400, help="most training texts of a teacher")
    make.add_argument("--unlabelled", type=int, default=1200, help="most unlabelled texts of a pool of teachers")
    make.add_argument("--max-tokens", type=int, default=24)
    make.add_argument("--passes", type=int, default=4)
    make.add_argument("--batch-size", type=int, default=16, help="of the teachers' training; amalgam's own: 32")
    make.add_argument("--least-steps", type=int, default=150, help="of the teachers' training; amalgam's own: 300")
    table = commands.add_parser("table", help="measure the estimators")
    table.set_defaults(run=_table)
    table.add_argument("--each", action="store_true", help="also a row for each setting")
    table.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), help="names, or path.py:function")
    table.add_argument("--no-thinned", action="store_true", help="only the settings as they are")
    accuracy = commands.add_parser("accuracy", help="compare the estimate of the targets' accuracy with the labels")
    accuracy.set_defaults(run=_accuracy)
    for command in (table, accuracy):
        command.add_argument("--only", nargs="+", default=[], help="settings whose name contains one of these")
    for command in (make, table, accuracy):
        command.add_argument("--json", action="store_true")
        command.add_argument("--folder", type=Path, default=Path("choice-benchmark"))
    options = parser.parse_args()
    options.run(options)


def _make(options: argparse.Namespace) -> None:
    folders = {name: _data_folder(name, options.data) for name in options.sets}
    fields = ("teacher_texts", "unlabelled", "max_tokens", "passes", "batch_size", "least_steps")
    sizes, pools = Sizes(*(getattr(options, field) for field in fields)), list(pools_of(folders, options.draws))
    count, began = 0, time.monotonic()
    for pool in pools:
        write_pool(pool, folders[pool.data], options.folder, sizes)
        for setting in settings_of(options.folder, pool):
            path, count = options.folder / "settings" / f"{setting.name}.npz", count + 1
            if not path.exists():
                started = time.monotonic()
                write_setting(setting, path)
                print(f"{path}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)  # noqa: T201
    seconds = round(time.monotonic() - began, 1)
    show([row("choice", "make", pools=len(pools), settings=count, seconds=seconds)], as_json=options.json)


def _data_folder(name: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / name / "train.parquet").is_file():
            return folder / name
    raise SystemExit(f"no folder of --data has {name}/train.parquet")


def _table(options: argparse.Namespace) -> None:
    estimators = estimators_of(list(dict.fromkeys([*RIVALS, *options.estimators])))
    figures = [
        _measured(variant, estimators, is_thinned=variant is not setting)
        for setting in _settings(options)
        for variant in ([setting] if options.no_thinned else [setting, *setting.thinned()])
    ]
    if options.each:
        show(list(_each(figures, estimators)), as_json=options.json)
    show([_summary(name, figures) for name in estimators], as_json=options.json)


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    settings = iter(load_settings(options.folder, options.only))
    first = next(settings, None)
    if first is None:
        raise SystemExit(f"{options.folder}/settings has no such setting: make some with `choice.py make`")
    yield first
    yield from settings


def _measured(setting: Setting, estimators: Mapping[str, Callable[[Setting], Array]], **about: Any) -> dict[str, Any]:
    began = time.process_time()
    _ = setting.estimated
    seconds = time.process_time() - began
    figures: dict[str, Any] = {"name": setting.name, "pool": setting.pool, "n": len(setting.gold), "signal": seconds}
    for name, estimator in estimators.items():
        began = time.process_time()
        weights = estimator(setting)
        spent = time.process_time() - began
        shares = {"right": setting.right(weights), "labels": setting.labelled(weights), "lost": setting.lost(weights)}
        figures[name] = {**shares, "seconds": spent}
    return figures | about


def _summary(name: str, figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the row of one estimator."""
    plain = [each for each in figures if not each["is_thinned"]]
    thinned = [each for each in figures if each["is_thinned"]]
    losses = {each["name"]: max(each[rival]["right"] for rival in RIVALS) - each[name]["right"] for each in figures}
    worst = max(losses, key=losses.__getitem__)
    skewed = np.array([each[name]["right"] for each in thinned])
    whole = np.array([each[name]["right"] for each in plain])
    return row(
        "choice",
        name,
        right=round(float(whole.mean()), 3),
        within=within([each["pool"] for each in plain], whole),
        worst=round(float(whole.min()), 3),
        labels=round(float(np.mean([each[name]["labels"] for each in plain])), 3),
        lost=round(float(np.mean([each[name]["lost"] for each in plain])), 3),
        thinned=round(float(skewed.mean()), 3) if thinned else None,
        thinned_worst=round(float(skewed.min()), 3) if thinned else None,
        thinned_tenth=round(float(np.quantile(skewed, 0.1)), 3) if thinned else None,
        thinned_lost=round(float(np.mean([each[name]["lost"] for each in thinned])), 3) if thinned else None,
        loss=round(losses[worst], 3),
        at=worst,
        settings=f"{len(plain)} of {len({each['pool'] for each in plain})} pools, {len(thinned)} thinned",
        seconds=round(float(np.mean([each[name]["seconds"] + each["signal"] for each in figures])), 2),
    )


def within(pools: Sequence[str], values: Array) -> float | None:
    """Returns half of the 95 % interval of the mean, by a bootstrap over pools; None for fewer than three."""
    groups: dict[str, list[float]] = defaultdict(list)
    for pool, value in zip(pools, values, strict=True):
        groups[pool].append(float(value))
    if len(groups) < 3:
        return None
    sums = np.array([[sum(own), len(own)] for own in groups.values()])
    drawn = np.random.default_rng(0).integers(len(sums), size=(BOOTSTRAPS, len(sums)))
    means = sums[drawn].sum(axis=1)
    low, high = np.quantile(means[:, 0] / means[:, 1], [0.025, 0.975])
    return round(float(high - low) / 2, 3)


def _each(figures: Sequence[Mapping[str, Any]], estimators: Iterable[str]) -> Iterator[dict[str, Any]]:
    for each in figures:
        right = {name: round(each[name]["right"], 3) for name in estimators}
        yield row("choice", each["name"], n=each["n"], **right)


def _accuracy(options: argparse.Namespace) -> None:
    """Estimates each data set's accuracies with the mean odds of the others."""
    measured: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    for setting in _settings(options):
        for variant in (setting, *setting.thinned()):
            weights, confirmed = with_confirmed(variant)
            measured[setting.name.partition("-")[0]].append((confirmed, variant.labelled(weights), variant is setting))
    missed: dict[str, Array] = {}
    inside: dict[str, Array] = {}
    for name, triples in measured.items():
        confirmed, right, _ = np.array(triples).T
        others = np.array(
            [triple[:2] for other, own in measured.items() if other != name for triple in own] or [(0.5, 0.5)]
        )
        estimate = _log_odds(confirmed) + (_log_odds(others[:, 1]) - _log_odds(others[:, 0])).mean()
        missed[name] = 1 / (1 + np.exp(-estimate)) - right
        inside[name] = np.abs(estimate - _log_odds(right)) <= np.log(weigh.ODDS_FACTOR)
    whole = {name: np.array([triple[2] for triple in triples]) for name, triples in measured.items()}
    for parts in (missed, inside, whole):
        parts["all"] = np.concatenate(list(parts.values()))
    shown = [
        row(
            "choice accuracy",
            name,
            n=len(errors),
            bias=round(float(errors.mean()), 3),
            error=round(float(np.abs(errors).mean()), 3),
            error_as_is=round(float(np.abs(errors[whole[name]]).mean()), 3),
            within_003=round(float((np.abs(errors[whole[name]]) <= 0.03).mean()), 2),
            in_interval=round(float(inside[name].mean()), 2),
        )
        for name, errors in missed.items()
    ]
    show(shown, as_json=options.json)


def _log_odds(shares: Array) -> Array:
    kept = np.clip(shares, 0.01, 0.99)
    return np.log(kept / (1 - kept))


if __name__ == "__main__":
    main()
