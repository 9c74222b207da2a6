"""The tree of commands: the headings of `amalgam --help`, shared options, and fixes for misspelt words."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from amalgam.pipeline.errors import COMMAND_LINE, ExperimentError, nearest
from amalgam.pipeline.signals import interrupted
from amalgam.stages.app import completion

STAGES = "Stages, in their order"
HEADINGS = ("Start", STAGES, "All stages", "The student", "The workspace")

Config = Annotated[Path, typer.Option("-c", "--config", readable=False, help="The experiment file.")]
"""`readable=False`: errors of amalgam have a place and a fix."""

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the result, and counts of bad rows.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

INSTEAD = {
    **dict.fromkeys(
        ("--from", "--only", "--stage", "--until"),
        "run the command of that stage, such as `amalgam build-targets`; it first runs the stages before it",
    ),
    "--dry-run": "run `amalgam plan`, which runs nothing",
    "--resume": "leave it out: the same command resumes",
    "compare": "run `amalgam report A B`, which compares students or experiment files",
    **dict.fromkeys(("distil", "distill", "fit", "merge", "resume", "start"), "did you mean run?"),
    **dict.fromkeys(("eval", "evaluate", "test"), "did you mean report?"),
    **dict.fromkeys(("check", "validate"), "did you mean plan or doctor?"),
    **dict.fromkeys(("classify", "infer"), "did you mean predict?"),
    **dict.fromkeys(("list", "ls"), "did you mean status?"),
    "clean": "did you mean gc?",
    "help": "did you mean --help?",
    "version": "did you mean --version?",
    "--cpu": "write execution.device=cpu",
    "--gpu": "write execution.device=cuda",
    "--set": "leave it out: write student.epochs=3",
    "--lr": "write student.learning_rate=VALUE or train_teachers.learning_rate=VALUE",
}
"""Fixes for options and commands of other tools."""

OTHER_OPTIONS = {"--file": "--input", "--model": "--student", "--no-cache": "--force", "--overwrite": "--force"}
"""Names of other tools for an option."""

PATH_OPTIONS = ("-c", "--config", "--input", "--into", "--oracle", "--out", "--student")

FIELD_OPTION = re.compile(r"--([a-z_-]+(?:\.[\w-]+)+)(=.*)?", re.DOTALL)
"""A field of the experiment that is written as an option."""

EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", re.DOTALL)
"""The message of Typer on arguments of a command that takes none."""


class GroupedCommands(TyperGroup):
    """Lists the commands under their headings, each with its whole help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        for heading in HEADINGS:
            rows = [(command.name, command.help) for command in commands if command.rich_help_panel == heading]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuses an unknown command with the nearest ones; the first word of a name counts as the name."""
        word = args[0]
        if word == "run":
            self._refuse_stages(args[1:])
        if word in self.commands or word.startswith("-"):
            return super().resolve_command(ctx, args)
        if "=" in word:
            command = next((name for name in args if name in self.commands), "run")
            raise ExperimentError(
                f"{word!r} is before the command", where=COMMAND_LINE, fix=f"write amalgam {command} {word}"
            )
        if word.endswith((".yaml", ".yml")):
            fix = f"write amalgam run -c {shlex.quote(word)}"
            raise ExperimentError(f"{word!r} is no command", where=COMMAND_LINE, fix=fix)
        names = self.list_commands(ctx)
        starts = nearest(word, [name.partition("-")[0] for name in names], ratio=0.6)
        close = nearest(word, names, ratio=0.6) or [name for name in names if name.partition("-")[0] in starts]
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        fix = INSTEAD.get(word) or f"{hint}`amalgam --help` lists all commands"
        raise ExperimentError(f"no command {word!r}", where=COMMAND_LINE, fix=fix)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Refuses an option before the command."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if not hasattr(error, "possibilities"):
                raise
            option, close = str(getattr(error, "option_name", "")), " or ".join(error.possibilities or ())
            owner = next((word for word in args if word in self.commands and option in self._options(word)), None)
            fix = f"did you mean {close}?" if close else "`amalgam --help` lists all options and commands"
            if owner:
                fix = f"write it after the command, such as `amalgam {owner} {option} ...`"
            raise ExperimentError(f"`amalgam` alone has no option {option}", where=COMMAND_LINE, fix=fix) from None

    def _refuse_stages(self, arguments: list[str]) -> None:
        """Refuses a stage after `run`, which takes overrides."""
        for argument in arguments:
            name = argument.replace("_", "-")
            if getattr(self.commands.get(name), "rich_help_panel", None) == STAGES:
                fix = f"run `amalgam {name}`, which first runs the stages before it"
                raise ExperimentError(f"`amalgam run` takes no stage {argument}", where=COMMAND_LINE, fix=fix)

    def _options(self, command: str) -> set[str]:
        return {option for parameter in self.commands[command].params for option in parameter.opts}

    def invoke(self, ctx: Any) -> Any:
        """Refuses an unknown option, a missing argument and a wrong value with a fix; those of Typer have none."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Polars raises it during a query
            raise interrupted(signal.SIGINT) from None
        except Exception as error:
            command = str(ctx.invoked_subcommand)
            if hasattr(error, "possibilities"):  # of NoSuchOption, whose module depends on Typer's version
                raise _unknown_option(error, command, self._options(command)) from None
            if hasattr(error, "format_message"):  # of any other wrong use
                raise _wrong_use(error, self.commands[command]) from None
            raise


def _unknown_option(error: Any, command: str, options: set[str]) -> ExperimentError:
    option = str(error.option_name)
    name = option.lstrip("-").replace("-", "_")
    names = sorted(word[2:] for word in options if word.startswith("--"))
    near = nearest(option.lstrip("-"), names, 2, ratio=0.6) if len(name) > 1 else []
    near = near or [other for other in names if other.startswith(name)]
    close = " or ".join(f"--{other}" for other in near)
    takes_fields = bool(options & {"overrides", "arguments"})
    fields = fields_named(name) if takes_fields else []
    if option.startswith("--dry") and "--yes" in options:
        fix = "leave it out: without --yes the command changes nothing"
    elif OTHER_OPTIONS.get(option) in options:
        fix = f"did you mean {OTHER_OPTIONS[option]}?"
    elif option in INSTEAD:
        fix = INSTEAD[option]
    elif fields:
        fix = f"write {' or '.join(f'{field}=VALUE' for field in fields)}"
    elif takes_fields and any(field.startswith(f"{name}.") for field in completion.fields()):
        fix = f"write {name}.FIELD=VALUE; `amalgam schema` lists the fields"
    else:
        fix = f"did you mean {close}?" if close else f"run `amalgam {command} --help`, which lists the options"
    return ExperimentError(f"`amalgam {command}` has no option {option}", where=COMMAND_LINE, fix=fix)


def _wrong_use(error: Any, command: Any) -> ExperimentError:
    """Returns the error of a missing argument or a wrong value, with an example of the command's help."""
    name, message = f"amalgam {command.name}", str(error.format_message()).rstrip(".")
    lines = [line.partition("  ")[0] for line in (command.epilog or "").splitlines()]
    examples = [line for line in lines if line.startswith(f"{name} ")]
    if extra := EXTRA.search(message):
        return _extra_argument(extra[1].split()[0], command)
    parameter, option = getattr(error, "param", None), getattr(error, "option_name", None)
    parameter = next((candidate for candidate in command.params if option in candidate.opts), parameter)
    what, fix = f"`{name}`: {message[:1].lower()}{message[1:]}", f"run `{name} --help`"
    if parameter and parameter.param_type_name == "option":
        examples = [line for line in examples if not {*parameter.opts}.isdisjoint(line.split())]
        value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or 'VALUE'}"
        fix = f"write `{name} {option or parameter.opts[-1]}{value}`"
    elif parameter:
        what = f"`{name}` needs {(parameter.metavar or parameter.name).upper()}"
    if parameter and examples:
        fix = f"write, for example, `{examples[0]}`"
    return ExperimentError(what, where=COMMAND_LINE, fix=fix)


def _extra_argument(word: str, command: Any) -> ExperimentError:
    """Returns the error of a command that takes options alone, with the option that the argument may be."""
    start, options = f"amalgam {command.name}", {option for parameter in command.params for option in parameter.opts}
    name, equals, value = word.partition("=")
    fix = f"run `{start} --help`, which lists the options"
    if f"--{name}" in options:
        fix = f"write `{start} --{name}{' ' * bool(value)}{value}`"
    elif name == "student.name" and "--student" in options:
        fix = f"write `{start} --student students/{value}`"
    elif equals and "--config" in options:
        fix = f"leave it out, or set {name} in the experiment file, which -c names"
    elif not equals and "--student" in options:
        fix = f"write `{start} --student {word}`"
    return ExperimentError(f"`{start}` takes no argument {word}", where=COMMAND_LINE, fix=fix)


def fields_named(name: str) -> list[str]:
    """Returns the fields of the experiment with this last part, those of the student first."""
    fields = [field for field in completion.fields() if field.rpartition(".")[2] == name]
    return sorted(fields, key=lambda field: not field.startswith("student."))


def _with_home(argument: str, previous: str) -> str:
    """Returns the path of an option with the home folder for ~/, which no shell inserts within quotes or after `=`."""
    option, equals, path = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    is_path = (option or previous) in PATH_OPTIONS and path.startswith("~/")
    return f"{option}{equals}{Path(path).expanduser()}" if is_path else argument


def as_overrides(arguments: list[str]) -> list[str]:
    """Returns the arguments with `--student.epochs=3` and `--student.epochs 3` as `student.epochs=3`."""
    fields: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option = FIELD_OPTION.fullmatch(argument)
        field = option[1].replace("-", "_") if option else ""
        if argument == "--":
            return [*fields, argument, *rest]
        if option is None:
            fields.append(_with_home(argument, previous=fields[-1] if fields else ""))
        elif option[2]:
            fields.append(field + option[2])
        elif (value := next(rest, "--")).startswith("--"):
            raise ExperimentError(f"{argument} has no value", where=COMMAND_LINE, fix=f"write {field}=VALUE")
        else:
            fields.append(f"{field}={value}")
    return fields
