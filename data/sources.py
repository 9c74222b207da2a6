"""Sources of texts: resolves a path, a folder, a glob or a remote address to files.

Remote addresses are streamed into a local file, so that rows.py reads local files only.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from amalgam.data.keys import shown
from amalgam.pipeline.errors import DataError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
KINDS = ", ".join(SUFFIXES)

INSTEAD = {
    ".txt": "; lines of plain text become a csv of one column by `text` as its first line",
    ".json": "; write an object a line, and end the name in .jsonl",
    ".xlsx": "; save the sheet as csv, UTF-8",
    ".gz": "; unpack it first",
}


def find_files(source: str, base: Path) -> list[Path]:
    """Returns the files of a path, a folder or a glob relative to `base`, in order of name."""
    path = base / Path(source).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    else:
        matches = glob.glob(source, root_dir=base, recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        files = sorted(base / match for match in matches if (base / match).is_file())
    if not files:
        raise _no_files(source, path)
    suffixes = sorted({file.suffix.lower() for file in files})
    if not set(suffixes) <= set(SUFFIXES):
        fix = f"the kinds are {KINDS}{INSTEAD.get(suffixes[0], '')}"
        raise DataError(f"{shown(source)} is of no kind that can be read", where=shown(str(files[0]), 200), fix=fix)
    if len(suffixes) > 1:
        fix = f"name one kind, such as {shown(source.rstrip('/'))}/*{suffixes[0]}" if path.is_dir() else "name one kind"
        what = f"{shown(source)} holds files of several kinds: {', '.join(suffixes)}"
        raise DataError(what, where=shown(str(path), 200), fix=fix)
    return files


def _no_files(source: str, path: Path) -> DataError:
    if path.is_dir():
        where = shown(str(path), 200)
        return DataError(f"no file of texts in {shown(source)}", where=where, fix=f"the kinds are {KINDS}")
    missing, parent = path, path.parent
    while not parent.is_dir():
        missing, parent = parent, parent.parent
    names = sorted(entry.name for entry in parent.iterdir())
    near = [shown(name) for name in nearest(missing.name, names) or names[:5]]
    fix = f"there are: {', '.join(near)}" if near else "put the file there, or name another"
    return DataError(
        f"{shown(source)} does not exist", where=f"no {shown(missing.name)} in {shown(str(parent), 200)}", fix=fix
    )


def fetch_remote(url: str, folder: Path) -> Path:
    """An hf:// or s3:// address, streamed by Polars into a local file whose rows keep their numbers.

    Polars reads the usual AWS_* and HF_* variables itself. Text formats are copied line by line, unparsed, for our own
    strict readers. A line end within a quoted csv field becomes a plain newline.
    """
    import polars as pl

    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rstrip("/").rpartition("/")[2])
    suffix = Path(name).suffix.lower()
    address = shown(re.sub(r"//[^/@]*@", "//", url.partition("?")[0]), 200)  # an address may carry a secret
    if suffix not in SUFFIXES or ("*" in url and suffix in {".csv", ".tsv"}):
        fix = f"end it in one of {KINDS}; of csv and tsv, name one file at a time"
        raise DataError(f"{address} does not name a file that can be read", where=address, fix=fix)
    target = folder / blake2b(url.encode(), digest_size=6).hexdigest() / name  # two addresses may end in one name
    target.parent.mkdir(exist_ok=True)
    try:
        if suffix == ".parquet":
            pl.scan_parquet(url).sink_parquet(target)
        else:
            pl.scan_lines(url).sink_csv(target, include_header=False, quote_style="never")
    except (OSError, pl.exceptions.PolarsError) as error:
        target.unlink(missing_ok=True)  # a sink that fails leaves a valid file of no rows
        reason = shown(str(error).replace(url, address), 200)
        fix = (
            "check the address and your access to it (AWS_* or HF_TOKEN), or fetch it yourself and name the local file"
        )
        raise DataError(f"{address} cannot be read", where=reason, fix=fix) from error
    return target


def nearest(name: str, names: Iterable[str]) -> list[str]:
    by_folded = {other.casefold(): other for other in names}
    return [by_folded[near] for near in difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.5)]
