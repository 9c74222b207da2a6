"""Speed, size and start of each form of a student: torch, ONNX and numpy, in fp32 and int8.

python benchmarks/exports.py [--texts PARQUET] [--count 2000] [--json]

The students have random weights: MiniLM's architecture, and a static student with as many tokens. So accuracies have
no meaning here, and `amalgam export --int8` prints them for trained students. texts_per_s is of batches and includes
tokenising with numpy. Its rival is torch in the same process.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from amalgam.benchmarks.protocol import row, show, texts_from

if TYPE_CHECKING:
    from collections.abc import Iterator

LABELS = 4
TORCH = "torch fp32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="a Parquet file with a column `text`; default: the embedded corpus")
    parser.add_argument("--count", type=int, default=2000, help="number of texts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        show(list(_rows(Path(scratch), options)), as_json=options.json)


def _rows(scratch: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from amalgam.benchmarks.models import save_classifier, save_static
    from amalgam.stages.app.export import export

    texts = scratch / "texts.csv"
    with texts.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts_from(options.texts, options.count))])
    save_classifier(scratch / "transformer", "random", LABELS)
    save_static(scratch / "static", LABELS)
    forms: tuple[tuple[Literal["onnx", "numpy"], str], ...] = (("onnx", "transformer"), ("numpy", "static"))
    for kind, name in forms:
        with redirect_stdout(sys.stderr):  # it prints the folder
            export(kind, Path("none.yaml"), scratch / name, None, force=True, quiet=True, int8=True, source=texts)
        facts = json.loads((scratch / f"{name}-{kind}-int8" / "export.json").read_text("utf-8"))["int8"]
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


if __name__ == "__main__":
    main()
