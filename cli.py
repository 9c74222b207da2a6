"""Defines the commands: options and help. The modules that do the work are imported when a command runs."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amalgam import __version__
from amalgam.data.lazy import LazyModule
from amalgam.pipeline.console import Console, printing
from amalgam.pipeline.errors import COMMAND_LINE, ExperimentError, OutputError
from amalgam.pipeline.signals import stopping
from amalgam.pipeline.user_paths import DEFAULT_FILE, user_path
from amalgam.stages import STAGE_FOLDERS
from amalgam.stages.app import completion, student_commands
from amalgam.stages.app.command_tree import HEADINGS, AsJson, Config, GroupedCommands, Quiet, as_overrides

if TYPE_CHECKING:
    from amalgam.stages.app import commands, report_command
else:
    commands, report_command = (LazyModule(f"amalgam.stages.app.{name}") for name in ("commands", "report_command"))

START, STAGES, WHOLE, STUDENT, WORKSPACE = HEADINGS
"""Headings of `amalgam --help`."""

app = typer.Typer(
    name="amalgam",
    cls=GroupedCommands,
    epilog="--debug, anywhere in a command, prints the traceback of an error.",
    help="Distil text classifiers with different labels into one student with all labels. No annotations.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FIELD=VALUE]...",
        help="Overrides, such as targets.temperature=0.5",
        autocompletion=completion.overrides,
    ),
]

Only = Annotated[
    bool, typer.Option("--no-upstream", help="Fail if an earlier stage is not current, instead of running it.")
]

Force = Annotated[bool, typer.Option("--force", help="Recompute a current result too; with `run`, all results.")]

Part = Annotated[str | None, typer.Option("--part", help="Run share i of n, such as 0/4; auto: from the job array.")]


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"amalgam {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def examples(*lines: str) -> str | None:
    """Returns the examples of a command's help; blank lines keep each on a line of its own."""
    return "\n\n".join(["Example:" if len(lines) == 1 else "Examples:", *lines]) if lines else None


@app.command(
    rich_help_panel=START,
    epilog=examples("amalgam demo", "amalgam demo --data-free", "amalgam demo somewhere student.epochs=2"),
)
def demo(
    folder: Annotated[
        str | None,
        typer.Argument(help="Folder of the demo: amalgam-demo, or amalgam-demo-data-free.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    data_free: Annotated[
        bool,
        typer.Option("--data-free", help="Use no corpus: a language model and the teachers generate the texts."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train three small classifiers, and students from them by several methods: offline, in minutes."""
    from amalgam.stages.app.demo import run_data_free, run_demo

    fields = overrides or []
    if folder is not None and "=" in folder.partition("/")[0]:  # no folder was given, only overrides
        fields, folder = [folder, *fields], None
    if data_free:
        run_data_free(user_path(folder or "amalgam-demo-data-free"), fields, quiet=quiet)
    else:
        run_demo(user_path(folder or "amalgam-demo"), fields, quiet=quiet)


@app.command(
    rich_help_panel=START,
    epilog=examples(
        "amalgam init",
        "amalgam init --from-teachers ./models/desk ./models/study cardiffnlp/twitter-roberta-base-emotion",
    ),
)
def init(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER | TEACHER...]", help="Folder for amalgam.yaml; or the teachers."),
    ] = None,
    from_teachers: Annotated[
        bool, typer.Option("--from-teachers", help="The arguments are models: Hub ids or folders; read their labels.")
    ] = False,
    into: Annotated[Path, typer.Option(readable=False, help="Folder for amalgam.yaml, with --from-teachers.")] = Path(),
) -> None:
    """Write a commented experiment file, with your teachers in it if you name them."""
    from amalgam.stages.app.init import write_experiment

    typer.echo(write_experiment(names or [], from_teachers=from_teachers, into=into))


def _accuracy(text: str) -> float:
    """Returns an accuracy that is written as 0.8 or 80%."""
    try:
        accuracy = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no accuracy; write 0.8 or 80%") from None
    if not 0 <= accuracy <= 1:
        fix = f"write {accuracy / 100:g}" if 1 < accuracy <= 100 else "write a share, such as 0.8"
        what = f"--fail-under {accuracy:g} is no accuracy between 0 and 1"
        raise ExperimentError(what, where=COMMAND_LINE, fix=fix)
    return accuracy


def _stage_command(name: str) -> Callable[..., None]:
    """Returns the command of a stage without options of its own."""

    def command(  # noqa: PLR0913 - the options of a command
        overrides: Overrides = None,
        config: Config = DEFAULT_FILE,
        only: Only = False,
        force: Force = False,
        part: Part = None,
        quiet: Quiet = False,
    ) -> None:
        commands.run_stages(config, overrides or [], target=name, only=only, force=force, part=part, quiet=quiet)

    return command


def build_targets(  # noqa: PLR0913 - the options of a command
    overrides: Overrides = None,
    config: Config = DEFAULT_FILE,
    mode: Annotated[
        str | None, typer.Option(help="targets.mode, such as soft or hard.", autocompletion=completion.modes)
    ] = None,
    oracle: Annotated[Path | None, typer.Option(help="Model folder; prints KL(its prediction || target).")] = None,
    only: Only = False,
    force: Force = False,
    part: Part = None,
    quiet: Quiet = False,
) -> None:
    """Adds the options of targets to the command of their stage."""
    fields = [*(overrides or []), *([f"targets.mode={mode}"] if mode else [])]
    commands.run_stages(
        config, fields, target="build-targets", only=only, force=force, part=part, quiet=quiet, oracle=oracle
    )


def report(  # noqa: PLR0913 - the options of a command
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | FIELD=VALUE]...",
            help="Overrides, such as report.calibration_bins=10. A student: prints its stored report. Several runs: "
            "compares them. A run is a student of this experiment, or an experiment file (x.yaml), which runs first.",
        ),
    ] = None,
    config: Config = DEFAULT_FILE,
    fail_under: Annotated[
        float | None,
        typer.Option(metavar="ACCURACY", help="Exit with code 4 below this accuracy, such as 0.8.", parser=_accuracy),
    ] = None,
    worse_than: Annotated[
        str | None,
        typer.Option(
            "--fail-if-worse-than",
            metavar="NAME",
            help="Exit with code 4 if this rival is significantly better: ensemble, zero-shot, a teacher (on its own "
            "labels) or another student.",
        ),
    ] = None,
    as_json: AsJson = False,
    only: Only = False,
    force: Force = False,
    part: Part = None,
    quiet: Quiet = False,
) -> None:
    """Adds the comparison of reports, and requirements, to the command of their stage."""
    requirements = report_command.Requirements(fail_under, worse_than, as_json)
    report_command.report(config, arguments or [], requirements, only=only, force=force, part=part, quiet=quiet)


_OWN_OPTIONS: dict[str, Callable[..., None]] = {"build-targets": build_targets, "report": report}

for _folder in STAGE_FOLDERS:
    _package, _name = import_module(f"amalgam.stages.{_folder}"), _folder.replace("_", "-")
    app.command(_name, rich_help_panel=STAGES, help=_package.HELP, epilog=examples(*_package.EXAMPLES))(
        _OWN_OPTIONS.get(_name) or _stage_command(_name)
    )


@app.command(
    rich_help_panel=WHOLE,
    epilog=examples("amalgam run", "amalgam run student.method=muka-soft", "amalgam run -c other.yaml --quiet"),
)
def run(
    overrides: Overrides = None,
    config: Config = DEFAULT_FILE,
    force: Force = False,
    part: Part = None,
    quiet: Quiet = False,
) -> None:
    """Run every stage that is not current. Running again resumes."""
    commands.run_stages(config, overrides or [], target=None, force=force, part=part, quiet=quiet)


@app.command(
    rich_help_panel=WHOLE,
    epilog=examples(
        "amalgam sweep student.seed=0,1,2",
        "amalgam sweep student.method=muka-soft,amalgam student.seed=0,1,2 execution.engine=ray",
    ),
)
def sweep(
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUE[,VALUE...]...",
            help="Overrides; fields with several values, such as student.seed=0,1,2, are swept.",
            autocompletion=completion.overrides,
        ),
    ],
    config: Config = DEFAULT_FILE,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a student for each combination of the values, and print a table. Running again resumes."""
    from amalgam.stages.app.sweep import run_sweep

    run_sweep(config, overrides, quiet=quiet, as_json=as_json)


@app.command(
    rich_help_panel=WHOLE,
    epilog=examples(
        "amalgam plan", "amalgam plan student.method=muka-soft", "amalgam plan --tree", "amalgam plan --estimate --json"
    ),
)
def plan(
    overrides: Overrides = None,
    config: Config = DEFAULT_FILE,
    as_json: AsJson = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--estimate", help="Run and time one unit of each stage without a recorded time; the results stay."
        ),
    ] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Print the stages as a tree instead of a table.")] = False,
) -> None:
    """Print the stages that `run` would run, with reasons and costs. Nothing runs without --estimate."""
    commands.show_plan(config, overrides or [], as_json=as_json, measure=measure, tree=tree)


@app.command(rich_help_panel=WHOLE, epilog=examples("amalgam explain build-targets targets.temperature=0.5"))
def explain(
    stage: Annotated[str, typer.Argument(help="The stage's name.", autocompletion=completion.stages)],
    overrides: Overrides = None,
    config: Config = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Print why a stage would run: the fields that differ from its last result."""
    commands.show_explanation(stage, config, overrides or [], as_json=as_json)


@app.command(rich_help_panel=WORKSPACE, epilog=examples("amalgam status", "amalgam status --json"))
def status(overrides: Overrides = None, config: Config = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """List the results in the workspace, and the last one of each stage."""
    commands.show_status(config, overrides or [], as_json=as_json)


@app.command(rich_help_panel=WORKSPACE, epilog=examples("amalgam verify", "amalgam verify --repair"))
def verify(
    overrides: Overrides = None,
    config: Config = DEFAULT_FILE,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also copy damaged delivered files again from the workspace.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every file of amalgam against its digest, and print the cost of each damage.

    Damaged results are quarantined, and the next run recomputes them.
    """
    commands.verify_workspace(config, overrides or [], repair=repair, as_json=as_json)


@app.command(rich_help_panel=WORKSPACE, epilog=examples("amalgam gc", "amalgam gc --unused --yes"))
def gc(  # noqa: PLR0913 - the options of a command
    overrides: Overrides = None,
    config: Config = DEFAULT_FILE,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only list.")] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Also results that neither the last builds nor this experiment use.")
    ] = False,
    compact: Annotated[bool, typer.Option("--compact", help="Pack many small units into few files instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List, and with --yes delete, leftovers: old temporary files, quarantine, files of no record."""
    if compact and unused:
        fix = "run `amalgam gc --compact`, then `amalgam gc --unused`"
        raise ExperimentError("--compact packs units, and --unused lists results", where="amalgam gc", fix=fix)
    if compact:
        commands.compact_workspace(config, overrides or [], yes=yes, as_json=as_json)
    else:
        commands.collect_garbage(config, overrides or [], yes=yes, unused=unused, as_json=as_json)


@app.command(rich_help_panel=WHOLE, epilog=examples("amalgam audit", "amalgam audit --json"))
def audit(overrides: Overrides = None, config: Config = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Compare the teachers from the cache, without labels: confidence, wins, conflicts, duplicates. Takes seconds."""
    commands.show_audit(config, overrides or [], as_json=as_json)


LABEL = """\
Examples:

amalgam label --count 50              writes labels.csv: texts to label, with the teachers' predictions as hints

amalgam label labels.csv              prints the changes by the labels in it, and accuracies with intervals

amalgam label --count 50 labels=labels.csv --out more.csv   writes these labels and 50 more texts

The texts are random: labels of uncertain ones do not improve the choice of other texts' teachers, and only random
ones estimate an accuracy. Rows without a label are left out.
"""


@app.command(rich_help_panel=WHOLE, epilog=LABEL)
def label(  # noqa: PLR0913 - the options of a command
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE | FIELD=VALUE]...", help="A file with labels to compare; overrides."),
    ] = None,
    config: Config = DEFAULT_FILE,
    count: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Number of texts to label. [default: 50]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed of the texts and of the hints' order. [default: 0]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. [default: labels.csv next to the experiment]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write random training texts to label; with a filled file, print the changes by its labels."""
    commands.label(arguments or [], config, count=count, seed=seed, out=out, as_json=as_json)


@app.command(rich_help_panel=START, epilog=examples("amalgam methods", "amalgam methods --json"))
def methods(as_json: AsJson = False) -> None:
    """List the amalgamation methods."""
    commands.show_methods(as_json=as_json)


@app.command(rich_help_panel=START, epilog=examples("amalgam schema"))
def schema() -> None:
    """Print the experiment file's JSON Schema."""
    from amalgam.stages.methods import experiment_schema

    Console().json(experiment_schema())


@app.command(rich_help_panel=START, epilog=examples("amalgam doctor", "amalgam doctor -c other.yaml"))
def doctor(overrides: Overrides = None, config: Config = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Print versions, device and disk, and the faults of models and texts with their fixes."""
    commands.show_health(config, overrides or [], as_json=as_json)


for _command, _epilog in student_commands.COMMANDS.items():
    app.command(rich_help_panel=STUDENT, epilog=_epilog)(_command)


def main() -> None:
    """Runs the command; errors print as message, place and fix, with --debug as a traceback."""
    _open_closed_streams()
    _buffer_output()
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        with stopping():
            _run_command(as_overrides(arguments))
    except Exception as error:  # noqa: BLE001 - each is printed, but for a reader that has enough, as `head` has
        from amalgam.pipeline.execution.faults import as_error

        shown = as_error(error)
        if not (isinstance(error, OutputError) and isinstance(error.__cause__, BrokenPipeError)):
            Console().say("".join(traceback.format_exception(error)).rstrip() if debug else f"error: {shown}")
        sys.exit(shown.exit_code)


def _run_command(arguments: list[str]) -> None:
    try:
        app(arguments, prog_name="amalgam")
    except (SystemExit, OSError) as leaving:
        if isinstance(leaving, SystemExit) or leaving.filename is None:  # perhaps of stdout
            with printing(sys.stdout):
                pass
        raise


def _open_closed_streams() -> None:
    """Opens the null device for closed streams, whose descriptors the next opened files would get."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def _buffer_output() -> None:
    """Gives stdout a buffer if PYTHONUNBUFFERED has removed it: a full disk may cut off output without one."""
    raw = getattr(sys.stdout, "buffer", None)
    if isinstance(raw, io.FileIO):
        raw = io.FileIO(raw.fileno(), "w", closefd=False)  # the descriptor may be a pipe by now
        raw.name = sys.stdout.name  # of messages
    if isinstance(raw, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, sys.stdout.errors)


if __name__ == "__main__":
    main()
