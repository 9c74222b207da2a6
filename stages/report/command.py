"""What `amalgam report` does with its arguments: overrides, experiment files, and students whose reports are there."""

from __future__ import annotations

from pathlib import Path

from amalgam.pipeline.errors import ExperimentError

FILES = (".yaml", ".yml")


def report(  # noqa: PLR0913 - the options of a command
    config: Path, arguments: list[str], *, only: bool, force: bool, part: str | None, quiet: bool
) -> None:
    from amalgam.stages.commands import run_stages

    overrides = [argument for argument in arguments if "=" in argument]
    named = [argument for argument in arguments if "=" not in argument]
    if not named or (len(named) == 1 and named[0].endswith(FILES)):
        one = Path(named[0]) if named else config
        run_stages(one, overrides, target="report", only=only, force=force, part=part, quiet=quiet)
    elif len(named) == 1:
        from amalgam.stages.report.comparison import read_report

        read_report(_page(config.parent, named[0]))  # one that is not there is told first
        what = f"{named[0]} alone has nothing to stand beside"
        raise ExperimentError(what, fix=f"name two runs or more; its own page is reports/{named[0]}.html")
    elif only or force or part:
        raise ExperimentError("--only, --force and --part are for one run", fix="leave them out, or name one file")
    else:
        _side_by_side(config, named, overrides, quiet=quiet)


def _side_by_side(config: Path, named: list[str], overrides: list[str], *, quiet: bool) -> None:
    """Each is read as soon as it is there: two files may call their students alike."""
    from amalgam.pipeline.console import Console
    from amalgam.stages.report.comparison import compare, read_report

    found = {}
    for name in named:
        path = _brought(Path(name), overrides, quiet=quiet) if name.endswith(FILES) else _page(config.parent, name)
        found[name.removesuffix(".yaml").removesuffix(".yml")] = read_report(path)
    files = [Path(name) for name in named if name.endswith(FILES)]
    compare((files[0] if files else config).parent.absolute(), found, Console(quiet=quiet))


def _brought(file: Path, overrides: list[str], *, quiet: bool) -> Path:
    """What the file says, as `run` would do it: nothing that an earlier command was told counts."""
    from amalgam.stages.commands import run_stages

    return run_stages(file, overrides, target=None, quiet=quiet).report.with_suffix(".json")


def _page(base: Path, name: str) -> Path:
    from amalgam.stages.report.delivery import ROOM

    return base / ROOM / f"{name}.json"
