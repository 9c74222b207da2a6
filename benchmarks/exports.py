"""Speed, size and start of each form of a student: torch, ONNX and numpy, in fp32 and int8.

python benchmarks/exports.py [--texts PARQUET] [--count 2000] [--json]
python benchmarks/exports.py --student FOLDER --texts TEST.parquet

Without --student the students have random weights: MiniLM's architecture, and a static student with as many tokens.
Their accuracies have no meaning and are left out. With --student a trained student is exported to ONNX. The texts need
a column `label` then, and the row `accuracy` has both accuracies. texts_per_s is of batches. Its rival is torch in fp32
in the same process. numpy includes tokenising, and is timed once, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from amalgam.benchmarks.protocol import row, show, texts_from

if TYPE_CHECKING:
    from collections.abc import Iterator

    import polars as pl

LABELS = 4
TORCH, INT8 = "torch fp32", "ONNX int8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="a Parquet file with a column `text`; default: the embedded corpus")
    parser.add_argument("--student", type=Path, help="folder of a trained student; default: random weights")
    parser.add_argument("--count", type=int, default=2000, help="number of texts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.student and not options.texts:
        parser.error("--student needs --texts with a column `label`")
    with tempfile.TemporaryDirectory() as scratch:
        show(list(_rows(Path(scratch), options)), as_json=options.json)


def _rows(scratch: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from amalgam.benchmarks.models import save_classifier, save_static
    from amalgam.stages.app.export import export

    texts = scratch / "texts.csv"
    _sample(options.texts, options.count, labelled=bool(options.student)).write_csv(texts)
    forms: list[tuple[Literal["onnx", "numpy"], str, Path]]
    if options.student:
        forms = [("onnx", "student", options.student)]
    else:
        transformer = save_classifier(scratch / "transformer", "random", LABELS)
        static = save_static(scratch / "static", LABELS)
        forms = [("onnx", "transformer", transformer), ("numpy", "static", static)]
    for kind, name, student in forms:
        out = scratch / f"{name}-{kind}-int8"
        with redirect_stdout(sys.stderr):  # it prints the folder
            export(kind, Path("none.yaml"), student, out, force=True, quiet=True, int8=True, source=texts)
        facts = json.loads((out / "export.json").read_text("utf-8"))["int8"]
        of_torch = next(speed["texts_per_second"] for speed in facts["speed"] if speed["form"] == TORCH)
        for speed in facts["speed"]:
            yield row(
                "exports",
                f"{name}: {speed['form']}",
                n=facts["texts"],
                texts_per_s=round(speed["texts_per_second"]),
                of_torch=round(speed["texts_per_second"] / of_torch, 2),
                mb=round(speed["bytes"] / 1e6, 1),
                one_text_ms=round(1000 * speed["one_text_seconds"], 2),
                start_s=round(speed["start_seconds"], 2) or None,  # torch's is not measured
            )
        if options.student:
            figures = {field: round(facts[field], 4) for field in ("accuracy_int8", "accuracy_fp32", "same_label")}
            int8 = next(speed["texts_per_second"] for speed in facts["speed"] if speed["form"] == INT8)
            yield row(
                "exports", f"{name}: accuracy", n=facts["labelled"], **figures, of_torch=round(int8 / of_torch, 2)
            )


def _sample(path: Path | None, count: int, *, labelled: bool) -> pl.DataFrame:
    """Returns random texts, with their labels where a student is trained."""
    import polars as pl

    if path is None or not labelled:
        return pl.DataFrame({"text": texts_from(path, count)})
    table = pl.read_parquet(path, columns=["text", "label"])
    return table.sample(min(count, len(table)), seed=0)


if __name__ == "__main__":
    main()
