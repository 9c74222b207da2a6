"""Compares an int8 export with the student (`amalgam export --int8`), and quantises ONNX exports.

A model that loses accuracy is refused. Weights and activations of ONNX are int8 (`write_int8`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import numpy as np
import torch

from amalgam.data.arrays import Array
from amalgam.data.corpus import find_files
from amalgam.data.keys import shown
from amalgam.data.rows import MissingColumnError, Row, read_rows
from amalgam.data.tokens import encode
from amalgam.pipeline.config.proposals import file_option
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import Console, size
from amalgam.pipeline.errors import AmalgamError, DataError, ExperimentError, WorkError
from amalgam.pipeline.user_paths import user_path
from amalgam.stages.app.api import Experiment
from amalgam.stages.app.serve import onnx_session, usable_cores
from amalgam.stages.app.student import StudentFolder
from amalgam.stages.common.corpus import fields
from amalgam.stages.common.inference.batches import Classifier, model_batches, model_inputs, predict
from amalgam.stages.common.intervals import paired, percent
from amalgam.stages.methods import load_with_methods

MOST_LOST = 0.004
"""Largest loss of accuracy on FEWEST_LABELLED or more labelled texts; a larger one must be significant to count."""
LEAST_SAME = 0.98
"""Smallest share of texts with the same label, if fewer texts have a gold label: two texts can be 1 % of these."""
FEWEST_LABELLED = 500
MOST_TEXTS = 2000
TIMED_TEXTS, SINGLE_TEXTS, ROUNDS = 64, 16, 5
BATCH_TOKENS = 1024
FLOAT, ONNX_RUNTIME = 1, "com.microsoft"
"""The number of fp32 in ONNX, and the domain of ONNX Runtime's own operators."""
FP32, INT8, TORCH = "ONNX fp32", "ONNX int8", "torch fp32"


class Speed(TypedDict):
    form: str
    bytes: int
    texts_per_second: float
    """In batches of texts of similar length."""
    one_text_seconds: float
    start_seconds: float


class Int8Agreement(TypedDict):
    texts: int
    source: str
    same_label: float
    labelled: int
    gained: int
    """Labelled texts on which only the int8 model is right."""
    lost: int
    accuracy_fp32: float | None
    accuracy_int8: float | None


class Int8Facts(Int8Agreement):
    speed: list[Speed]


class OnnxInt8Facts(Int8Facts):
    independent_texts: bool
    """Whether the texts of a batch do not change each other's answers."""


# ---- the texts


@dataclass(frozen=True)
class ComparedTexts:
    texts: list[tuple[str, ...]]
    gold: list[str | None]
    source: str


def compared_texts(student: StudentFolder, config: Path, source: Path | None, *, int8: bool) -> ComparedTexts | None:
    """Returns at most MOST_TEXTS texts for int8: of the file, else of corpus.test, else of the training texts."""
    if not int8:
        if source is not None:
            fix = "add --int8, or omit --input"
            raise ExperimentError("--input names texts that int8 is compared on", where="amalgam export", fix=fix)
        return None
    if source is not None:
        return _of_file(student, config, source)
    compared = _of_experiment(config)
    fix = "name a file of texts for this student with --input FILE"
    student.check_pairs(len(compared.texts[0]), compared.source, fix, fix)
    return compared


def _of_file(student: StudentFolder, config: Path, source: Path) -> ComparedTexts:
    path = user_path(str(source), kind=DataError, where="--input")
    if not path.is_file():
        raise DataError("the input file does not exist", where=str(path.absolute()), fix="set --input FILE")
    find_files(str(path), Path.cwd())  # refuses a kind of file that cannot be read
    corpus = load_with_methods(config).experiment.corpus if config.is_file() else Corpus()
    columns = list(student.learned or corpus.text)
    corpus = corpus.model_copy(update={"text": columns, "label": corpus.label or "label", "id": "auto"})
    rows: list[Row] = []
    try:
        for row in islice(read_rows(path, corpus=corpus), MOST_TEXTS):
            if isinstance(row, Row):
                rows.append(row)
            elif corpus.on_bad_row != "skip":
                raise DataError(f"a row cannot be used: {row.reason}", where=row.where, fix=row.fix)
    except MissingColumnError as error:
        error.fix = f"rename the columns of texts in the file: {' and '.join(map(shown, columns))}"
        raise
    if not rows:
        raise DataError(f"no rows in {shown(path.name)}", where=str(path), fix="fill it, or name another")
    return ComparedTexts([row.fields for row in rows], [row.label for row in rows], path.name)


def _of_experiment(config: Path) -> ComparedTexts:
    try:
        experiment = Experiment.open(config, [], Console(quiet=True))
        part = "test" if experiment.config.corpus.test else "train"
        table = experiment.texts(part).head(2 * MOST_TEXTS).collect()
        # Half of few training texts: the others determine the tokens that the numpy export keeps.
        table = table.head(MOST_TEXTS if part == "test" else (len(table) + 1) // 2)
    except AmalgamError as error:
        what = f"--int8 compares the model on texts, and the experiment's cannot be read: {error.what}"
        fix = f"run `amalgam run{file_option(config)}`, or name a file of texts with --input FILE"
        raise ExperimentError(what, where=error.where or str(config), fix=fix) from error
    return ComparedTexts(fields(table.to_arrow()), table["label"].to_list(), f"corpus.{part}")


# ---- the model


def write_int8(fp32: Path, path: Path) -> None:
    """Writes products of tokens and weights, and tables of vectors, in int8; everything else stays fp32.

    Each token of an input, each output of a product and each row of a table has its own scale.
    So a token with large values takes no bits from others, and the texts of a batch do not change each other's answers.
    """
    import onnx
    from onnx import helper

    model = onnx.load(fp32)
    graph = model.graph
    del graph.value_info[:]  # types before the change
    weights = {each.name: each for each in graph.initializer if len(each.dims) == 2 and each.data_type == FLOAT}
    rewritten = _Int8Graph()
    for node in graph.node:
        # Heads, which have transposed weights, and selected columns stay fp32.
        is_other = any(option.i for option in node.attribute if option.name in ("transA", "transB", "axis"))
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights and not is_other:
            rewritten.product(node, weights[node.input[1]])
        elif node.op_type == "Gather" and node.input[0] in weights and not is_other:
            rewritten.lookup(node, weights[node.input[0]])
        else:
            rewritten.nodes.append(node)
    used = {name for node in rewritten.nodes for name in node.input}
    kept = [each for each in graph.initializer if each.name in used]
    for field, values in ((graph.node, rewritten.nodes), (graph.initializer, [*kept, *rewritten.arrays.values()])):
        del field[:]
        field.extend(values)
    model.opset_import.append(helper.make_opsetid(ONNX_RUNTIME, 1))
    onnx.save(model, path)


class _Int8Graph:
    """The nodes and arrays of an int8 model."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arrays: dict[str, Any] = {}
        self._quantised = set[str]()

    def product(self, node: Any, weights: Any) -> None:
        (tokens, _, *bias), (output,) = node.input, node.output
        step, middle = self._array("int8_step", np.float32(1 / 127)), self._array("int8_middle", np.uint8(128))
        if tokens not in self._quantised:  # queries, keys and values have the same input
            self._quantised.add(tokens)
            last, least = self._array("int8_axis", np.array([-1])), self._array("int8_least", np.float32(1e-6))
            self._add("Abs", [tokens], f"{tokens}_absolute")
            self._add("ReduceMax", [f"{tokens}_absolute", last], f"{tokens}_highest", keepdims=1)
            self._add("Max", [f"{tokens}_highest", least], f"{tokens}_scale")  # a token of zeros alone stays finite
            self._add("Div", [tokens, f"{tokens}_scale"], f"{tokens}_unit")
            self._add("QuantizeLinear", [f"{tokens}_unit", step, middle], f"{tokens}_int8")
        numbers, scales = self._quantise(weights, axis=0)
        inputs = [f"{tokens}_int8", numbers, step, scales, middle]
        self._add("MatMulIntegerToFloat", inputs, f"{output}_unit", domain=ONNX_RUNTIME)
        self._add("Mul", [f"{output}_unit", f"{tokens}_scale"], f"{output}_product" if bias else output)
        if bias:
            self._add("Add", [f"{output}_product", *bias], output)

    def lookup(self, node: Any, table: Any) -> None:
        (_, ids), (output,) = node.input, node.output
        for array, name in zip(self._quantise(table, axis=1), (f"{output}_int8", f"{output}_scale"), strict=True):
            self._add("Gather", [array, ids], name)
        self._add("Cast", [f"{output}_int8"], f"{output}_unit", to=FLOAT)
        self._add("Mul", [f"{output}_unit", f"{output}_scale"], output)

    def _add(self, kind: str, inputs: list[str], output: str, **options: Any) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], **options))

    def _array(self, name: str, values: Any) -> str:
        from onnx import numpy_helper

        self.arrays.setdefault(name, numpy_helper.from_array(np.asarray(values), name))
        return name

    def _quantise(self, array: Any, axis: int) -> tuple[str, str]:
        """Returns the names of the int8 numbers and their scales; a scale is of the numbers along `axis`."""
        from onnx import numpy_helper

        values = numpy_helper.to_array(array)
        largest = np.abs(values).max(axis=axis, keepdims=True)
        if axis == 0:  # CPUs without VNNI add two products in 16 bits: 255 times a sum of at most 128
            largest = np.maximum(largest, np.abs(values[:-1:2] + values[1::2]).max(axis=axis, keepdims=True, initial=0))
        scales = np.maximum(largest, 1e-12) / 127
        numbers = np.rint(values / scales).astype(np.int8)
        scales = scales[0] if axis == 0 else scales
        return self._array(f"{array.name}_int8", numbers), self._array(f"{array.name}_scales", scales)


def compare(classifier: Classifier, fp32: Path, int8: Path, texts: ComparedTexts) -> OnnxInt8Facts:
    """Returns accuracy, agreement, size and speed of the int8 model next to the student."""
    tokens = encode(classifier.tokenizer, texts.texts, classifier.limit, types=classifier.types)
    logits = predict(classifier.model, tokens.ids, pad_id=classifier.pad_id, type_ids=tokens.type_ids)
    expected = logits.argmax(axis=1)
    rows = model_batches(classifier.model.config, tokens.ids, BATCH_TOKENS)
    batches = [model_inputs(tokens.ids, tokens.type_ids, batch, classifier.pad_id) for batch in rows]
    started = {FP32: _start(fp32), INT8: _start(int8, parallel=True)}
    quantised = np.empty(len(expected), np.int64)
    for batch, inputs in zip(rows, batches, strict=True):
        quantised[batch] = started[INT8][0](inputs).argmax(axis=1)
    forms: dict[str, Callable[[Any], Any]] = {TORCH: lambda inputs: classifier.model(**inputs).logits}
    forms |= {name: run for name, (run, _) in started.items()}
    order = np.random.default_rng(0).permutation(len(tokens.ids))[:TIMED_TEXTS]
    alone = min(len(order), SINGLE_TEXTS)
    timed = [order[rows] for rows in model_batches(classifier.model.config, tokens.ids.take(order), BATCH_TOKENS)]
    timed_inputs = [model_inputs(tokens.ids, tokens.type_ids, batch, classifier.pad_id) for batch in timed]
    rates = _texts_per_second(forms, timed_inputs)
    single = [model_inputs(tokens.ids, tokens.type_ids, order[[row]], classifier.pad_id) for row in range(alone)]
    singles = _texts_per_second(forms, single)
    sizes = {TORCH: weight_bytes(classifier), FP32: fp32.stat().st_size, INT8: int8.stat().st_size}
    starts = {TORCH: 0.0, **{name: seconds for name, (_, seconds) in started.items()}}
    return {
        **agreement(classifier.labels, texts, expected, quantised),
        "independent_texts": True,
        "speed": [
            {
                "form": name,
                "bytes": sizes[name],
                "texts_per_second": rates[name],
                "one_text_seconds": 1 / singles[name],
                "start_seconds": starts[name],
            }
            for name in forms
        ],
    }


def agreement(labels: Sequence[str], texts: ComparedTexts, expected: Array, quantised: Array) -> Int8Agreement:
    """Compares the student's labels of the texts, by number, with those of the int8 model."""
    names = {label: index for index, label in enumerate(labels)}
    gold = np.array([names.get(label or "", -1) for label in texts.gold], np.int64)
    labelled = gold >= 0
    right = [(predicted == gold)[labelled] for predicted in (expected, quantised)]
    accuracies = [float(part.mean()) if labelled.any() else None for part in right]
    return {
        "texts": len(expected),
        "source": texts.source,
        "same_label": float((quantised == expected).mean()),
        "labelled": int(labelled.sum()),
        "gained": int((right[1] & ~right[0]).sum()),
        "lost": int((right[0] & ~right[1]).sum()),
        "accuracy_fp32": accuracies[0],
        "accuracy_int8": accuracies[1],
    }


def weight_bytes(classifier: Classifier) -> int:
    return sum(path.stat().st_size for path in classifier.folder.glob("model*.safetensors"))


def _start(path: Path, *, parallel: bool = False) -> tuple[Callable[[Any], Array], float]:
    """Returns a function from a batch to logits, and the seconds until the session was ready.

    `parallel`: each core runs a part of the batch instead of a part of each product, as `amalgam serve` does with int8.
    """
    began, cores = time.perf_counter(), usable_cores()
    threads, workers = (1, cores) if parallel else (cores, 1)
    session, pool = onnx_session(path, threads), ThreadPoolExecutor(workers)
    seconds = time.perf_counter() - began

    def run(inputs: Any) -> Array:
        def run_part(rows: Array) -> Array:
            return session.run(["logits"], {name: value.numpy()[rows] for name, value in inputs.items()})[0]

        count = len(inputs["input_ids"])
        return np.concatenate(list(pool.map(run_part, np.array_split(np.arange(count), min(count, workers)))))

    return run, seconds


def _texts_per_second(
    forms: dict[str, Callable[[Any], Any]], batches: Sequence[dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Times all forms in turn, batch by batch; the first round is a warm-up."""
    texts = sum(len(inputs["input_ids"]) for inputs in batches)
    rounds: dict[str, list[float]] = {name: [] for name in forms}
    with torch.inference_mode():
        for _ in range(ROUNDS + 1):
            seconds = dict.fromkeys(forms, 0.0)
            for inputs in batches:
                for name, run in forms.items():
                    began = time.perf_counter()
                    run(inputs)
                    seconds[name] += time.perf_counter() - began
            for name, value in seconds.items():
                rounds[name].append(value)
    return {name: texts / median(values[1:]) for name, values in rounds.items()}


def check_loss(facts: Int8Facts, *, force: bool) -> None:
    """Refuses an int8 model that clearly loses more than MOST_LOST; of few labelled texts, LEAST_SAME decides."""
    before, after, labelled = facts["accuracy_fp32"] or 0.0, facts["accuracy_int8"] or 0.0, facts["labelled"]
    change = paired(facts["gained"], facts["lost"], labelled)
    if labelled >= FEWEST_LABELLED and change.mean < -MOST_LOST and change.high < 0:
        what = f"int8 loses {-100 * change.mean:.1f} points of accuracy ({percent(before)} to {percent(after)})"
        where = f"{labelled:,} labelled texts of {facts['source']}; at most {100 * MOST_LOST:.1f} are allowed"
    elif labelled < FEWEST_LABELLED and facts["same_label"] < LEAST_SAME:
        what = f"int8 gives {100 * (1 - facts['same_label']):.1f} % of the texts another label"
        where = f"{facts['texts']:,} texts of {facts['source']}; at most {100 * (1 - LEAST_SAME):.0f} % are allowed"
    else:
        return
    if not force:
        fix = "use the fp32 export: omit --int8; or accept the loss with --force"
        raise WorkError(what, where=where, fix=fix)


def show(console: Console, facts: Int8Facts) -> None:
    before, after = facts["accuracy_fp32"], facts["accuracy_int8"]
    share = percent(facts["same_label"])
    same = f"{share} of {facts['texts']:,} texts of {facts['source']} have the same label in int8"
    if before is not None and after is not None:
        accuracies = f"{percent(before)} in fp32, {percent(after)} in int8"
        same += f"; accuracy on {facts['labelled']:,} labelled ones {accuracies}"
    console.say(same)
    for row in facts["speed"]:
        start = "" if row["form"] == TORCH else f", ready in {row['start_seconds']:.2f} s"
        rate, alone = f"{row['texts_per_second']:,.0f} texts/s", f"{1000 * row['one_text_seconds']:.1f} ms"
        console.say(f"  {row['form']:<10}  {size(row['bytes']):>8}  {rate:>14}, one text {alone:>8}{start}")
