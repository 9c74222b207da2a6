"""Tests `amalgam report`: a page without requests or scripts, with escaped texts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from amalgam.stages.common.intervals import interval
from amalgam.tests.workspaces import (
    TEACHER_LABELS,
    TEST,
    TRAIN,
    Workspace,
    age,
    amalgam,
    build_once,
    read_csv,
    up_to_date,
    write_csv,
    write_texts,
)

VOID = {"meta", "br", "path", "rect", "circle"}


class Page(HTMLParser):
    """Tags, their attributes and the text of a page; opened and closed as they must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def page_of(workspace: Workspace, name: str = "student") -> str:
    return (workspace.folder / f"reports/{name}.html").read_text("utf-8")


def check_needs_nothing(text: str) -> None:
    """No script, no request, and a policy that would allow neither."""
    page = Page(text)
    assert len(text.encode()) < 1_000_000
    assert {"script", "link", "img", "iframe", "object", "form", "base"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert {"src", "style", "xlink:href", "action"}.isdisjoint(attributes)
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    [policy] = [one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy"]
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    assert "@import" not in style


# ---- the page of an ordinary run


def test_the_page_needs_nothing_but_itself(built: Workspace) -> None:
    check_needs_nothing(page_of(built))


def test_the_last_line_is_the_path_of_the_page(built: Workspace) -> None:
    result = built("report")
    assert result.err.splitlines()[-1] == "report: reports/student.html"
    assert "student (muka-soft)" in result.out


def test_the_table_has_the_interval_of_the_reported_accuracy(built: Workspace) -> None:
    evaluation = built.numbers()["evaluation"]
    low, high = interval(evaluation["systems"][evaluation["system"]]["accuracy"], evaluation["n"])
    line = f"\n95 % interval of {evaluation['system']}: {100 * low:.1f} to {100 * high:.1f}\n"
    assert line in built("report", "student").out


def test_the_page_has_the_numbers_of_the_evaluation(built: Workspace) -> None:
    [path] = built.artifacts.glob("report/*/report-*/evaluation.json")
    system = json.loads(path.read_text())["systems"]["student (muka-soft)"]
    numbers, text = built.numbers(), Page(page_of(built)).text
    assert numbers["evaluation"]["systems"]["student (muka-soft)"]["accuracy"] == system["accuracy"]
    assert numbers["student_quality"]["matrix"]["counts"] == system["confusion"]
    assert re.search(rf"muka-soft.*{100 * system['accuracy']:.1f} %.*\b{TEST} test texts", text)
    assert all(name in text for own in TEACHER_LABELS.values() for name in own)
    assert all(step["fingerprint"] in text for step in numbers["stages"])
    assert "chance" in text
    assert "majority baseline" in text


def test_the_page_has_the_date_size_coverage_and_calibration_of_the_student(built: Workspace) -> None:
    numbers, text = built.numbers(), Page(page_of(built)).text
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", numbers["date"])
    assert f"Student “student” Method muka-soft, evaluated on {numbers['date']}" in text
    own, *teachers = numbers["models"]
    assert (own["model"], [row["model"] for row in teachers]) == ("student", ["first", "second"])
    assert own["per_second"] > 0
    share = own["parameters"] / sum(row["parameters"] for row in teachers)
    assert f"{100 * share:.1f} % of the 2 teachers together" in text
    assert re.search(r"probabilities are (about right|\d+\.\d points too (high|low)) on average", text)
    coverage = numbers["student_quality"]["coverage"]
    assert coverage["thresholds"][0]["n"] == coverage["curve"][-1]["n"] == TEST
    assert "of all answers are right" in text
    assert "Accuracy by text length" in text
    shown = [note for note in numbers["notes"] if "steps are few" not in note["note"]]
    assert shown
    assert all(f"Note of {note['stage']}" in text for note in shown)
    assert "undertrained" in text


def test_stages_name_the_stages_that_they_read(built: Workspace) -> None:
    reads = {stage["stage"]: stage["needs"] for stage in built.numbers()["stages"]}
    assert reads["read-corpus"] == []
    assert {"cache-teachers", "build-targets", "train-student"} <= set(reads["report"])


def test_accuracies_of_different_texts_are_not_subtracted(built: Workspace) -> None:
    section = Page(page_of(built)).text.split("Where accuracy is lost")[2].split("Teachers")[0]
    quality = built.numbers()["student_quality"]["teachers"]
    assert f"{100 * quality['oracle'] / quality['n']:.1f} % n = {TEST}" in section
    assert "points" not in section


def test_calibration_and_ece_agree(built: Workspace) -> None:
    numbers = built.numbers()
    assert numbers["student_quality"]["calibration"]
    for name, bins in numbers["student_quality"]["calibration"].items():
        gap = sum(one["n"] * abs(one["accuracy"] - one["confidence"]) for one in bins) / TEST
        assert gap == pytest.approx(numbers["evaluation"]["systems"][name]["ece"])
        assert sum(one["n"] for one in bins) == TEST


def test_right_and_wrong_teachers_are_counted_by_the_gold_labels(built: Workspace) -> None:
    quality = built.numbers()["target_quality"]
    assert (quality["texts"], quality["sample"], quality["labelled"]) == (TRAIN, TRAIN, TRAIN)
    right, wrong = quality["uncertainty"]["right"], quality["uncertainty"]["wrong"]
    assert (right["n"], wrong["n"]) == (TRAIN, TRAIN)  # every label has one of the two teachers
    assert (sum(right["counts"]), sum(wrong["counts"])) == (TRAIN, TRAIN)
    assert quality["choice"]["chance"] == pytest.approx(0.5)
    summary = quality["targets"]["summary"]["selection"]["all"]
    assert [quality["choice"]["right"], quality["choice"]["n"]] == summary
    shares = quality["audit"]["conflicts"]["shares"]
    assert shares[0][1] == shares[1][0]


def test_the_same_result_gives_the_same_bytes(workspace: Workspace) -> None:
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (workspace.folder / "reports").iterdir() if path.is_file()}

    before = files()
    for name in before:
        (workspace.folder / "reports" / name).unlink()
    workspace("run")
    assert files() == before
    assert set(before) == {"student.html", "student.json"}


def test_an_equal_page_is_not_written_again(workspace: Workspace) -> None:
    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (workspace.folder / "reports").iterdir()}

    before = stamps()
    workspace("report")
    assert stamps() == before


def test_a_reused_stage_keeps_its_seconds_and_state(workspace: Workspace) -> None:
    stages = {step["stage"]: step for step in workspace.numbers()["stages"]}
    assert list(stages) == ["read-corpus", "cache-teachers", "build-targets", "train-student", "report"]
    assert {step["state"] for step in stages.values()} == {"made"}
    assert all(step["seconds"] > 0 for step in stages.values())
    workspace("report", "report.calibration_bins=7")
    later = {step["stage"]: step for step in workspace.numbers()["stages"]}
    assert [later[stage]["state"] for stage in stages] == ["reused", "reused", "reused", "reused", "made in part"]
    for stage in list(stages)[:-1]:
        assert later[stage]["seconds"] == stages[stage]["seconds"]


def test_another_programs_file_is_not_overwritten_and_no_link_followed(workspace: Workspace) -> None:
    page = workspace.folder / "reports/student.html"
    page.write_text("mine")
    assert "reports/student.html" in workspace.refusal(2, "run", "report.calibration_bins=9")
    assert page.read_text() == "mine"
    page.unlink()
    page.symlink_to(workspace.folder / "amalgam.yaml")
    workspace.refusal(2, "report")
    assert "corpus:" in workspace.config.read_text()


def test_the_cost_of_a_result_is_deleted_with_it(workspace: Workspace) -> None:
    workspace("build-targets", "targets.temperature=0.5")
    age(workspace.artifacts)
    workspace("gc", "--unused", "--yes", "targets.temperature=0.5")
    left = sorted(path.parent for path in workspace.artifacts.rglob("timing.json"))
    assert left == sorted(path.parent for path in workspace.artifacts.rglob("MANIFEST.json"))
    assert (workspace.artifacts / "build-targets") in {path.parent for path in left}


# ---- fewer inputs


def test_without_test_texts_the_page_has_no_accuracy(workspace: Workspace) -> None:
    result = workspace("report", "corpus.test=null")
    assert "test texts" in result.err
    text = Page(page_of(workspace)).text
    assert "no labelled test texts" in text
    assert "Confusion matrix" not in text
    assert "Uncertainty" in text
    check_needs_nothing(page_of(workspace))


def test_without_gold_labels_the_page_has_the_mixture(workspace: Workspace) -> None:
    workspace.edit("label: label", "label: null")
    workspace("report", "corpus.test=null")
    numbers = workspace.numbers()
    assert numbers["target_quality"]["uncertainty"] is None
    assert sum(numbers["target_quality"]["mixture"]["largest"]["counts"]) == TRAIN
    assert sum(numbers["target_quality"]["mixture"]["mean"].values()) == pytest.approx(1, abs=1e-6)
    assert "no gold labels" in Page(page_of(workspace)).text


def test_a_method_that_trains_nothing_has_a_page_of_its_own(workspace: Workspace) -> None:
    workspace("report", "student.method=ensemble")
    text = Page(page_of(workspace, "ensemble")).text
    assert "ensemble" in text
    assert "Disputed texts" not in text
    assert (workspace.folder / "reports/student.html").exists()


# ---- the verdict


def test_a_run_ends_with_the_verdict_and_the_page_starts_with_it(built: Workspace) -> None:
    verdict = built.numbers()["verdict"]
    out = built("report").out
    first, *more = out[out.index("verdict:") :].splitlines()
    assert first.startswith(f"verdict: {verdict['decision']}. {verdict['reasons'][0]}")
    assert any(line.startswith("  next: ") for line in more)
    assert verdict["decision"] in Page(page_of(built)).text.split("Accuracy of every system")[0].lower()
    assert {rival["name"] for rival in verdict["rivals"]} >= {"ensemble", "zero-shot", "first", "second"}
    assert "few-steps" in {cause["code"] for cause in verdict["causes"]}
    assert Page(page_of(built)).text.count("steps are few") == 1


def test_the_console_counts_the_cautions_that_only_the_page_has(workspace: Workspace) -> None:
    workspace.write([row for row in workspace.texts("test") if row[1] != "music"], "test")
    run = workspace("report")
    cautions = workspace.numbers()["verdict"]["cautions"]
    assert "fewer than 10 test texts" in cautions[-1]
    more = f"{len(cautions)} more cautions in reports/student.html\n"
    assert more in run.out + run.err
    stored = workspace("report", "student")
    assert more in stored.out + stored.err


def test_test_texts_that_teachers_learned_are_named_and_a_caution(workspace: Workspace) -> None:
    workspace.train_teachers("texts: texts/test.csv")
    ran, number = workspace("run"), len({text for text, _ in workspace.texts("test")})
    note = f"{number} of {number} test texts are also in train_teachers.texts, which the teachers learn: "
    assert note in ran.err
    assert len(re.findall(r"test\.csv row \d+", ran.err)) == 5
    learned = f"{number} of {number} test texts were learned with their gold labels"
    caution = f"{learned}: accuracies are up to 100.0 points too high."
    assert f"  caution: {caution}" in ran.out.splitlines()
    numbers = workspace.numbers()
    assert numbers["verdict"]["decision"] != "ship"
    assert caution in numbers["verdict"]["cautions"]
    assert numbers["data"]["learned_by_teachers"] == {"test": number}
    given, others = workspace.texts()[:10], workspace.texts("test")
    workspace.write(given, "given")
    workspace.write([*given, *others], "both")
    ran = workspace("report", "corpus.test=texts/both.csv", "labels=texts/given.csv")
    assert f"{number + 10} of {number + 10} test texts were learned with their gold labels" in ran.out


def test_json_is_all_that_is_printed(built: Workspace) -> None:
    assert json.loads(built("report", "--json").out) == built.numbers()


def test_another_student_of_the_workspace_is_a_rival(workspace: Workspace) -> None:
    workspace("run", "student.name=other", "student.epochs=2")
    workspace("run")
    [rival] = [rival for rival in workspace.numbers()["verdict"]["rivals"] if rival["kind"] == "student"]
    other = workspace.numbers("other")["evaluation"]["systems"]["student (muka-soft)"]
    assert (rival["name"], rival["right"]) == ("other", round(other["accuracy"] * TEST))
    assert rival["right"] - rival["student_right"] == rival["lost"] - rival["gained"]


def test_without_test_texts_there_are_texts_to_label_and_their_labels_are_kept(workspace: Workspace) -> None:
    gold = dict(workspace.texts())
    assert workspace("report", "corpus.test=null").out.startswith("verdict: ")
    numbers, path = workspace.numbers(), workspace.folder / "reports/student.to-label.csv"
    quality, verdict = numbers["unlabelled"], numbers["verdict"]
    rows = read_csv(path)
    assert quality["to_label"] == len(rows) == TRAIN
    assert sum(label["predicted"] for label in quality["labels"]) == TRAIN
    text = Page(page_of(workspace)).text
    assert "student.to-label.csv" in text
    assert "Predicted labels" in text
    assert quality["agreement"]["n"] <= TRAIN
    assert {row["text"] for row in rows} == gold.keys()
    assert {row["why"] for row in rows} == {"random"}  # all training texts are in the file
    assert "no-labels" in {cause["code"] for cause in verdict["causes"]}
    before = path.read_bytes()
    workspace("report", "corpus.test=null")
    assert path.read_bytes() == before

    write_csv(path, rows[0], [{**row, "label": gold[row["text"]]}.values() for row in rows])
    labelled = path.read_bytes()
    assert "was kept" in workspace("report", "corpus.test=null").err
    workspace("run", "corpus.test=reports/student.to-label.csv")
    assert path.read_bytes() == labelled
    assert workspace.numbers()["evaluation"]["n"] == TRAIN
    assert not any("selected" in caution for caution in workspace.numbers()["verdict"]["cautions"])
    assert workspace.attempt("report", "corpus.test=null", "--fail-under", "0.5").code == 2
    changed = workspace.attempt("report", "corpus.test=null", "student.seed=9", "--fail-if-worse-than", "ensemble")
    assert (changed.code, "train-student" in changed.err) == (2, False), changed.err


def test_a_student_trained_again_under_its_name_can_be_made_again(workspace: Workspace) -> None:
    file, better = ("-c", "other.yaml"), ("student.epochs=20", "student.learning_rate=1e-2")
    workspace.config.rename(workspace.folder / "other.yaml")
    workspace("run", *file, *better)
    labels = [row["label"] for row in workspace("predict", *file, "--input", "texts/test.csv").rows]
    labels[:2] = [own[0] for own in TEACHER_LABELS.values()]  # both teachers have a test text
    workspace.write([(text, label) for (text, _), label in zip(workspace.texts("test"), labels, strict=True)], "test")
    workspace("run", *file, *better)
    workspace("run", *file)
    verdict = workspace.numbers()["verdict"]
    [rival] = [rival for rival in verdict["rivals"] if rival["kind"] == "student"]
    assert rival["student_is"] == "worse"
    command = verdict["next"]["command"]
    assert "student.epochs=20" in command
    assert "student.name=better" in command
    again = workspace(*shlex.split(command)[1:])
    assert "train-student: reused" in again.err
    workspace("run", *file)
    assert workspace.numbers()["verdict"]["next"]["command"] == "amalgam report better -c other.yaml"
    workspace("report", "better", "student", *file)


def test_a_supervised_student_decides_nothing_without_its_targets(workspace: Workspace) -> None:
    workspace("run", "targets.mode=supervised", "student.name=gold", "student.epochs=2")
    for manifest in (workspace.artifacts / "build-targets").glob("*/MANIFEST.json"):
        if json.loads(manifest.read_text())["identity"]["config"]["targets"]["mode"] == "supervised":
            shutil.rmtree(manifest.parent)
    workspace("run")
    kinds = {rival["name"]: rival["kind"] for rival in workspace.numbers()["verdict"]["rivals"]}
    assert kinds["gold"] == "supervised student"


def test_training_texts_without_a_target_are_no_targets_that_a_student_misses(fresh: Workspace) -> None:
    fresh.replace_teachers("")
    fresh.write([(text, "none" if row % 2 else label) for row, (text, label) in enumerate(fresh.texts())])
    fresh("run", "targets.mode=supervised", "corpus.unknown=none", "corpus.test=null")
    unlabelled = fresh.numbers()["unlabelled"]
    assert unlabelled["n"] == sum(row["expected"] for row in unlabelled["labels"]) == TRAIN / 2
    assert all(row["expected"] == row["mass"] for row in unlabelled["labels"])


def test_notes_of_the_run_are_kept(workspace: Workspace) -> None:
    def notes() -> list[str]:
        return [note["note"] for note in workspace.numbers()["notes"] if note["stage"] == "train-student"]

    assert any("steps are few" in note for note in notes())
    assert "steps are few" not in workspace("run").err  # nothing was trained
    assert notes()


# ---- hostile


def test_hostile_texts_and_labels_stay_text(workspace: Workspace) -> None:
    payloads = [
        "<script>window.pwned=1</script>",
        "\"'><img src=x onerror=alert(1)>",
        "{{ 7 * 7 }}{% include 'page.css' %}",
        "</style></pre></svg><iframe src=javascript:alert(1)>",
        "\u202etxet\u2066 \x1b[31m\x00 ]]> <!-- --><svg onload=alert(1)>",
    ]
    rows = workspace.texts("test")
    workspace.write([(f"{payloads[place % 5]} {text}", label) for place, (text, label) in enumerate(rows)], "test")
    train = [(f"{payloads[place % 5]} {text}", label) for place, (text, label) in enumerate(workspace.texts()[:30])]
    workspace.write(train)
    hostile = dict(zip(TEACHER_LABELS["first"], payloads, strict=False))
    workspace.edit("model: ./models/first", f"model: ./models/first\n    rename: {json.dumps(hostile)}")
    workspace("run", "corpus.on_bad_row=skip", "student.epochs=1")
    text = page_of(workspace)
    check_needs_nothing(text)
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= EXPECTED
    assert payloads[0] in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "\u202e" not in text
    assert "\x1b" not in text


EXPECTED = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "span", "div", "p", "b", "code", "ol"}
EXPECTED |= {"ul", "li", "br", "table", "thead", "tbody", "tr", "th", "td", "svg", "path", "text", "circle", "rect"}
EXPECTED |= {"figure", "figcaption", "details", "summary", "pre", "nav", "a"}


# ---- comparison


@pytest.fixture
def two(built: Workspace, shared: Path, tmp_path: Path) -> Workspace:
    """Return a copy of an experiment with two students."""
    settings = "targets.temperature=0.5", "student.name=warm", "student.method=muka-soft"
    build = build_once(shared / "two-students", lambda folder: up_to_date(built.copy(folder), *settings))
    return build.copy(tmp_path / "workspace")


def test_two_students_are_compared(two: Workspace) -> None:
    as_json = two("report", "student", "warm", "--json").json
    result = two("report", "student", "warm")
    assert result.err.splitlines()[-1] == "report: reports/comparison.html"
    outside = amalgam("report", "-c", str(two.config), "students/student", "warm", folder=two.folder.parent)
    assert outside.err.splitlines()[-1] == "report (in workspace): reports/comparison.html"
    other = two.copy(two.folder.parent / "other")
    with_file = two("report", "student", str(other.config))
    assert with_file.err.splitlines()[-1] == "report: reports/comparison.html"
    two("report", "student", "warm")
    pages, text = two.numbers("comparison"), page_of(two, "comparison")
    assert [row["name"] for row in pages["runs"]] == ["student", "warm"]
    assert as_json == pages
    assert {"field": "targets.temperature", "values": ["0.2", "0.5"]} in pages["settings"]
    first, second = (row["accuracy"] for row in pages["runs"])
    against = pages["runs"][1]["against_first"]
    assert against["mean"] == pytest.approx(second - first)
    assert against["low"] <= against["mean"] <= against["high"]
    assert "targets.temperature" in Page(text).text
    check_needs_nothing(text)


def test_students_of_other_temperatures_are_a_sweep(two: Workspace) -> None:
    rows = two.numbers("warm")["sweep"]
    assert [(row["temperature"], row["ours"]) for row in rows] == [(0.2, False), (0.5, True)]
    assert "Temperature" not in Page(page_of(two)).text  # as it was when it was drawn
    text = Page(page_of(two, "warm")).text
    assert "τ = 0.5" in text
    table = text.split("Accuracy of every system")[2].split("Coverage")[0]
    assert "student student" in table


def test_two_files_are_compared_with_overrides(two: Workspace) -> None:
    (two.folder / "warm.yaml").write_text(
        two.config.read_text().replace("mode: soft", "mode: soft\n  temperature: 0.5")
    )
    result = two("report", "amalgam.yaml", "warm.yaml", "report.calibration_bins=9")
    assert [row["name"] for row in two.numbers("comparison")["runs"]] == ["amalgam", "warm"]
    assert result.out.count("against the first") == 1
    assert {"field": "targets.temperature", "values": ["0.2", "0.5"]} in two.numbers("comparison")["settings"]
    assert two.numbers()["settings"]["report"]["calibration_bins"] == 9
    assert two.attempt("report", "amalgam.yaml", "warm.yaml", "--force").code == 2


def test_equal_students_have_the_same_accuracy(two: Workspace) -> None:
    reports = two.folder / "reports"
    (reports / "copy.json").write_bytes((reports / "student.json").read_bytes())
    compared = two("report", "student", "copy").out
    assert "student and copy have the same accuracy, " in compared
    assert "\nchange: points of accuracy gained or lost at each step from the teachers to the student." in compared


def test_a_missing_run_is_refused_with_the_existing_ones(two: Workspace) -> None:
    assert "student, warm" in two.refusal(2, "report", "student", "cold")
    assert two.attempt("report", "student").code == 0
    (two.folder / "reports/odd.json").write_text('{"amalgam_report": 0}')
    assert two.attempt("report", "student", "odd").code == 3


def test_students_measured_on_other_texts_of_one_file_are_not_compared(fresh: Workspace) -> None:
    texts = {label: text for text, label in fresh.texts("test")}
    fresh.write([(f"{text} {copy}", label) for label, text in texts.items() for copy in range(8)], "test")
    config = fresh.config.read_text()
    for name, other in (("first", "second"), ("second", "first")):
        left = config.replace(f"  - name: {other}\n    model: ./models/{other}\n", "")
        (fresh.folder / f"{name}.yaml").write_text(left)
        fresh("run", "-c", f"{name}.yaml", f"student.name=of-{name}", "corpus.on_bad_row=skip")
    second = fresh.numbers("of-second")
    assert fresh.numbers("of-first")["evaluation"]["n"] == second["evaluation"]["n"] == 32
    assert "of-first" not in {rival["name"] for rival in [*second["students"], *second["verdict"]["rivals"]]}
    fresh("report", "of-first", "of-second")
    assert fresh.numbers("comparison")["runs"][1]["against_first"] is None
    assert "different test texts or gold labels" in fresh.numbers("comparison")["summary"]
    refused = fresh.attempt("report", "of-second", "--fail-if-worse-than", "of-first")
    assert (refused.code, "of-first was not measured on the test texts of of-second" in refused.err) == (2, True)
    gate = ("report", "-c", "second.yaml", "student.name=of-second", "corpus.on_bad_row=skip", "--fail-if-worse-than")
    lost = "this student lacks labels of students/of-first, which 32 of 64 test texts have: "
    assert lost in fresh.attempt(*gate, "of-first").err


def test_the_group_size_of_buckets_does_not_change_the_evaluation(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amalgam.stages.report import evaluation

    fresh.write([(f"{text} {number}", label) for number in range(15) for text, label in fresh.texts("test")], "test")

    items = []
    for most in (4096, 1):
        monkeypatch.setattr(evaluation, "GROUP_TEXTS", most)
        fresh("report", "--force")
        items.append(fresh.numbers())
    whole, parts = items
    assert whole["evaluation"]["n"] == 600
    for name, system in whole["evaluation"]["systems"].items():
        scores = {score: system[score] for score in ("accuracy", "macro_f1", "nll_nats", "ece")}
        assert {score: parts["evaluation"]["systems"][name][score] for score in scores} == pytest.approx(scores)
    assert {**parts["student_quality"], "errors": 0, "calibration": 0} == {
        **whole["student_quality"],
        "errors": 0,
        "calibration": 0,
    }
    assert [one["text"] for one in parts["student_quality"]["errors"]] == [
        one["text"] for one in whole["student_quality"]["errors"]
    ]


def test_a_folder_whose_name_is_a_pattern_is_read_as_it_is(built: Workspace, tmp_path: Path) -> None:
    workspace = built.copy(tmp_path / "a[1]*")
    shutil.rmtree(workspace.artifacts / "report")
    workspace("report")
    assert (workspace.folder / "reports/student.html").is_file()


# ---- unknown texts


STRANGE = [(f"zygote quasar fjord {word}", "none") for word in ("one", "two", "three", "four", "five", "six")]


def test_test_texts_of_no_teacher_measure_whether_the_student_flags_them(workspace: Workspace) -> None:
    rows = workspace.texts("test")
    before = workspace.numbers()["evaluation"]
    write_texts(workspace.folder / "texts/test.csv", rows + STRANGE)
    assert "not one of the student's: none" in workspace.refusal(3, "report")
    result = workspace("report", "corpus.unknown=none")
    after = workspace.numbers()
    assert after["evaluation"]["systems"] == before["systems"]  # accuracies are those of the other texts
    assert (after["evaluation"]["n"], after["evaluation"]["left_out"]) == (len(rows), 0)
    unknown = after["student_quality"]["unknown"]
    assert (unknown["labelled"], unknown["unknown"]) == (len(rows), len(STRANGE))
    shown = [
        entry["unknown"] for entry in workspace("predict", *(text for text, _ in rows), "--unknown", "--json").json
    ]
    strange = workspace("predict", *(text for text, _ in STRANGE), "--unknown", "--json").json
    scores, others = [entry["score"] for entry in shown], [entry["unknown"]["score"] for entry in strange]
    pairs = [(a > b) + (a == b) / 2 for a in others for b in scores]
    assert unknown["auroc"] == pytest.approx(sum(pairs) / len(pairs))
    assert unknown["labelled_flagged"] == sum(entry["flag"] for entry in shown)
    shown_line = f"of {len(STRANGE)} unknown test texts and "
    assert shown_line in " ".join(result.err.split())
    assert f"(AUROC {unknown['auroc']:.3f}, 95 % interval" in " ".join(result.err.split())
    assert "Unknown texts" in Page(page_of(workspace)).text


def test_without_unknown_test_texts_the_report_has_the_share_of_flagged_ones(built: Workspace) -> None:
    unknown = built.numbers()["student_quality"]["unknown"]
    assert (unknown["labelled"], unknown["unknown"], unknown["auroc"], unknown["curve"]) == (TEST, 0, None, [])
    assert "No test text has the label of corpus.unknown" in Page(page_of(built)).text


def test_an_unknown_label_is_no_label_of_a_teacher_or_of_the_list(fresh: Workspace) -> None:
    assert "also in corpus.labels" in fresh.refusal(2, "plan", "corpus.labels=[banking, law]", "corpus.unknown=law")
