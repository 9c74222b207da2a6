"""Delivers results to folders next to the experiment file: students/NAME, teachers/NAME, exports, pages of reports.

A mark has the name, size and digest of every delivered file. All other files of the folder are the user's: they stay,
and they are never damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import filecmp
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from amalgam.pipeline.errors import ExperimentError, ModelError
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.backend import QUARANTINE
from amalgam.pipeline.storage.local import alone_in, atomic_write, make_folder, sync, temporary_path
from amalgam.pipeline.storage.paths import TEMPORARY_NAME, check_path, regular, small_content
from amalgam.pipeline.storage.small_files import copy_of, signed, verified
from amalgam.pipeline.storage.store import Store, StoredFile, content_fault
from amalgam.pipeline.user_paths import check_writable

METADATA = ".amalgam.json"
"""The mark of a delivered folder, which also has facts for users of the model."""
COPY_OF_MARK = copy_of(METADATA)
MARKS = (METADATA, COPY_OF_MARK)
STUDENTS, TEACHERS, REPORTS = "students", "teachers", "reports"
FOLDERS = (STUDENTS, TEACHERS, REPORTS)
PAGES = ".amalgam"
"""Folder in reports/ with the marks of the pages."""
EXPORT = "export"
"""Kind of a folder that is made of a student and is none."""
RENAME_EXCHANGE = 2
"""Flag of the system call renameat2."""
ATTEMPTS = 20
"""Number of times that a folder is put in place while other processes replace it."""

Digest = Callable[[Path], str]


@dataclass(frozen=True)
class Mark:
    """The content of a mark: `files` by name; `facts` are for users."""

    fingerprint: str
    files: Mapping[str, StoredFile]
    """The path of a file is that of its original in the workspace; "" if the workspace has none."""
    facts: Mapping[str, Any]
    kind: str = ""

    def to_json(self) -> dict[str, Any]:
        files = {
            name: {"bytes": file.bytes, "sha256": file.sha256, **({"stored": file.path} if file.path else {})}
            for name, file in self.files.items()
        }
        kind = {"kind": self.kind} if self.kind else {}
        return {"fingerprint": self.fingerprint, **kind, **self.facts, "files": files}


@dataclass(frozen=True)
class DeliveryServices:
    """The workspace, the digests and the notes of the run that delivers."""

    store: Store
    digest_of: Digest
    """Reads a file only if its size or its times have changed."""
    note: Callable[[str], None]


# ---- marks


def read_mark(folder: Path) -> Mark | None:
    """Returns the folder's mark or its copy; None if the folder has no readable mark."""
    contents = (verified(small_content(folder / name)) for name in MARKS)
    return next((mark for content in contents if content and (mark := _mark(content))), None)


def _mark(content: Mapping[str, Any]) -> Mark | None:
    facts = {name: value for name, value in content.items() if name not in {"fingerprint", "files", "kind"}}
    try:
        files = {
            check_path(name): StoredFile(
                check_path(file["stored"]) if "stored" in file else "", int(file["bytes"]), str(file["sha256"])
            )
            for name, file in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(content.get("fingerprint"), str):
        return None
    return Mark(content["fingerprint"], files, facts, str(content.get("kind", "")))


def page_mark(base: Path, name: str) -> Mark | None:
    return read_mark(base / REPORTS / PAGES / name)


def write_mark(folder: Path, mark: Mark) -> None:
    """Writes the mark and its copy; equal ones stay untouched."""
    text = signed(mark.to_json())
    for name in MARKS:
        if small_content(folder / name) != text:
            with atomic_write(folder / name) as temporary:
                temporary.write_bytes(text)


def unreadable_marks(folder: Path) -> list[str]:
    """Returns the names of the mark and its copy, if the folder has a mark and one of them is damaged or missing."""
    mark = read_mark(folder)
    if mark is None:
        return [METADATA] if has_mark(folder) else []
    return [name for name in MARKS if small_content(folder / name) != signed(mark.to_json())]


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """Returns the fingerprint and the facts of a delivered model, or None."""
    mark = read_mark(folder)
    return None if mark is None or mark.kind == EXPORT else {"fingerprint": mark.fingerprint, **mark.facts}


def delivered_students(base: Path) -> dict[str, str]:
    """Returns the names of the folders in students/ by the fingerprints of their students."""
    folders = sorted((folder for folder in (base / STUDENTS).glob("*") if folder.is_dir()), reverse=True)
    metadata = {folder.name: read_metadata(folder) for folder in folders}
    return {str(content["fingerprint"]): name for name, content in metadata.items() if content}


def delivered_student(base: Path, name: str) -> str | None:
    """Returns the fingerprint of the student that the folder students/`name` has; None if it has none."""
    folders = {folder.name: folder for folder in (base / STUDENTS).glob("*") if folder.is_dir()}
    content = read_metadata(folders[name]) if name in folders else None
    return str(content["fingerprint"]) if content else None


def marked_folders(base: Path) -> Iterator[tuple[Path, Path]]:
    """Yields the folder of each mark and the folder of its files."""
    for name in (STUDENTS, TEACHERS):
        yield from ((folder, folder) for folder in _folders(base / name))
    yield from ((folder, base / REPORTS) for folder in _folders(base / REPORTS / PAGES))


def _folders(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in paths if not TEMPORARY_NAME.fullmatch(path.name))


def named(files: Iterable[StoredFile]) -> dict[str, StoredFile]:
    """Returns the files of one unit by their names in its folder."""
    return {"/".join(file.path.split("/")[3:]): file for file in files}


def written_files(folder: Path) -> dict[str, StoredFile]:
    """Returns the files that were just written to a folder, for its mark."""
    paths = sorted(path for path in folder.iterdir() if path.name not in MARKS)
    return {path.name: StoredFile("", path.stat().st_size, file_digest(path)) for path in paths}


# ---- checks


def faults(folder: Path, files: Mapping[str, StoredFile], digest_of: Digest = file_digest) -> dict[str, str]:
    """Returns the fault of each delivered file that is missing or differs from its mark."""
    return {name: fault for name, file in files.items() if (fault := _fault(folder, name, file, digest_of))}


def _fault(folder: Path, name: str, file: StoredFile, digest_of: Digest) -> str | None:
    path = regular(folder, name)
    if path is None:
        return "no regular file" if os.path.lexists(folder / name) else "missing"
    return content_fault(path, file, digest_of)


def check_delivered(folder: Path, file_option: str) -> None:
    """Refuses a delivered model with a file that differs from its mark; a folder without a mark is not checked."""
    mark, marks = read_mark(folder), " and ".join(MARKS)
    is_delivered, again = folder.absolute().parent.name == STUDENTS, "copy or export the folder again"
    if mark is None and has_mark(folder):
        what = f"the model has a damaged {METADATA}, so its files cannot be checked"
        fix = f"run `amalgam run{file_option}`, which writes it again" if is_delivered else again
        fix = f"{fix}; if the model is yours, delete {marks}"
        raise ModelError(what, where=str(folder.absolute()), fix=fix)
    damaged = faults(folder, mark.files) if mark else {}
    if damaged:
        name, fault = next(iter(damaged.items()))
        more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        fix = f"run `amalgam verify --repair{file_option}`" if is_delivered else again
        fix = f"{fix}; if you changed the file yourself, delete {marks}"
        raise ModelError(f"the model is damaged: {name} ({fault}){more}", where=str(folder.absolute()), fix=fix)


def has_mark(folder: Path) -> bool:
    """Returns whether the folder has a mark or its copy, readable or not, and of any kind."""
    return any(os.path.lexists(folder / name) for name in MARKS)


def is_copy_of(folder: Path, files: Mapping[str, StoredFile]) -> bool:
    """Returns whether every file is in the folder, unchanged; a folder that has lost its mark is known by that."""
    return bool(files) and not faults(folder, files)


def refuse_links(base: Path, path: Path) -> None:
    """Refuses a path below the experiment's folder that is a link or behind one."""
    for level in (path, *path.parents):
        if level == base:
            return
        if level.is_symlink():
            what = f"{level.relative_to(base).as_posix()} is a link, behind which amalgam writes no file"
            raise ExperimentError(what, where=str(level), fix="remove the link, or choose another name")


def check_target(base: Path, folder: str, name: str, files: Mapping[str, StoredFile] | None = None) -> Path:
    """Returns base/folder/name; raises an error, before any work, if amalgam did not make the present folder.

    A folder with a damaged mark is amalgam's if it has all these files.
    """
    target = base / folder / name
    refuse_links(base, target)
    is_ours = read_metadata(target) is not None or (has_mark(target) and is_copy_of(target, files or {}))
    if target.exists() and not is_ours:
        what = f"{folder}/{name} exists and was not made by amalgam"
        if has_mark(target):
            what = f"{folder}/{name} has a damaged {METADATA}, and its files are not those of the workspace"
        raise ExperimentError(what, where=str(target), fix="move it away, or choose another name")
    return target


def check_deliverable(base: Path, folder: str, name: str) -> None:
    """Refuses, before any work, a folder that `deliver` could not write or replace."""
    check_writable(base / folder, "change its permissions")
    target = check_target(base, folder, name)
    if target.exists():
        check_writable(target, "change its permissions")


# ---- delivery


def deliver(services: DeliveryServices, target: Path, mark: Mark) -> None:
    """Copies the files of the mark from the workspace to the folder.

    Where they were delivered before, damaged ones are copied again.
    """
    present, files = read_mark(target), mark.files
    originals = services.store.verified_paths(files.values())
    if present is None and has_mark(target) and is_copy_of(target, files):
        services.note(f"{_shown(target / METADATA)} was damaged, and so was its copy; it is written again")
        for name in MARKS:
            set_aside(services.store, target / name)
        write_mark(target, mark)
        return
    if present is not None and present.fingerprint == mark.fingerprint and present.files == files:
        mend(services, target, files, faults(target, files, services.digest_of))
        write_mark(target, mark)
        return
    if present is not None and not _has_originals(services.store, present):
        name = f"{target.parent.name}/{target.name}"
        services.note(f"{name} was a model that this workspace does not have; it is replaced")

    def write(folder: Path) -> None:
        for name, original in zip(files, originals, strict=True):
            _copy(original, folder / name)
        write_mark(folder, mark)

    check_writable(target.parent, "change its permissions")
    replace_folder(target, write, services)


def _has_originals(store: Store, mark: Mark) -> bool:
    originals = [file.path for file in mark.files.values() if file.path]
    return len(store.backend.sizes(originals)) == len(set(originals))


def mend(services: DeliveryServices, target: Path, files: Mapping[str, StoredFile], damaged: Mapping[str, str]) -> None:
    """Copies damaged files again from the workspace; the present ones go to quarantine."""
    for name, fault in damaged.items():
        original = services.store.verified_path(files[name])
        make_folder((target / name).parent)
        with atomic_write(target / name) as temporary:
            _copy(original, temporary)
            place = set_aside(services.store, target / name)  # after the copy: the disk may be full
        services.note(f"{_shown(target / name)} was damaged ({fault}); copied again from the workspace{place}")


def restore_original(store: Store, file: StoredFile, copy: Path) -> None:
    """Puts a delivered file in the workspace again."""
    temporary = temporary_path(store.root)
    try:
        _copy(copy, temporary)
        store.backend.put({file.path: temporary})
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(target: Path, write: Callable[[Path], None], services: DeliveryServices | None = None) -> None:
    """Replaces `target` by a new folder with a mark, and keeps the user's files.

    With services, former files of amalgam that have changed, and files of the user in the way, go to quarantine.
    """
    temporary, replaced = temporary_path(target.parent), list[Path]()
    make_folder(target.parent)
    try:
        temporary.mkdir()
        write(temporary)
        sync(temporary)
        _keep_files(target, temporary, move=False)
        _put_in_place(temporary, target, replaced)
        sync(target.parent)
        for earlier in replaced:
            taken = _keep_files(earlier, target, move=True)
            if services:
                _set_replaced_aside(services, earlier, target, taken)
            shutil.rmtree(earlier)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def deliver_page(
    folder: Path, name: str, fingerprint: str, texts: Mapping[str, bytes], services: DeliveryServices | None
) -> None:
    """Writes the files of a page into the folder, and their mark below it; equal files stay untouched.

    Another process that writes the same page waits, so that the mark is that of the files.
    """
    marks = folder / PAGES / name
    refuse_links(folder.parent, marks)
    make_folder(folder)
    with alone_in(folder):
        present = read_mark(marks)
        changed = faults(folder, present.files) if present else {}
        for file, text in texts.items():
            if small_content(folder / file) == text:
                continue
            if services and changed.get(file, "missing") != "missing":
                where = set_aside(services.store, folder / file)
                services.note(f"{folder.name}/{file} had changed since it was written ({changed[file]}){where}")
            with atomic_write(folder / file) as temporary:
                temporary.write_bytes(text)
        files = {file: StoredFile("", len(text), hashlib.sha256(text).hexdigest()) for file, text in texts.items()}
        make_folder(marks)
        write_mark(marks, Mark(fingerprint, files, {}))


def _put_in_place(temporary: Path, target: Path, replaced: list[Path]) -> None:
    """Renames the folder; another process may do the same at the same time. After a failure the former one is back."""
    if _exchange(temporary, target):
        replaced.append(temporary.rename(temporary_path(target.parent)))
        return
    for attempt in range(ATTEMPTS):
        earlier = temporary_path(target.parent)
        with contextlib.suppress(FileNotFoundError):
            target.rename(earlier)
            replaced.append(earlier)
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST} or attempt == ATTEMPTS - 1:
                if replaced:
                    with contextlib.suppress(OSError):  # another process may have put its folder there
                        replaced[-1].rename(target)
                raise
        else:
            return


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step, in which no kill leaves `other` absent; returns False where Linux cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return renameat2 is not None and renameat2(0, paths[0], 0, paths[1], RENAME_EXCHANGE) == 0


def _set_replaced_aside(services: DeliveryServices, earlier: Path, target: Path, taken: Collection[str]) -> None:
    """Moves files that a user has changed or added to quarantine."""
    mark = read_mark(earlier)
    changed = faults(earlier, mark.files) if mark else {}
    for name in (*taken, *changed):
        if os.path.lexists(earlier / name):
            where = set_aside(services.store, earlier / name)
            services.note(f"{_shown(target / name)} had changed since its delivery and is replaced{where}")


def set_aside(store: Store, path: Path) -> str:
    """Moves a file, if it exists, to the workspace's quarantine on this machine; returns the place for a message."""
    if not os.path.lexists(path):
        return ""
    place = store.root / QUARANTINE / f"{uuid.uuid4().hex[:8]}-{path.name[-100:]}"
    make_folder(place.parent)
    shutil.move(path, place)
    with contextlib.suppress(OSError):
        os.utime(place, follow_symlinks=False)  # its time in quarantine starts now
    return f", and the former file is {place}"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    sync(target)


def _shown(path: Path) -> str:
    return "/".join(path.parts[-3:])


# ---- the user's files


def files_of_user(folder: Path) -> list[str]:
    """Returns the files, links and empty folders that amalgam did not deliver."""
    mark = read_mark(folder)
    if mark is None:
        return []
    return [path for path in _entries(folder) if path not in {*MARKS, *mark.files}]


def _entries(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        empty = [name for name in folders if name not in links and not any((Path(parent) / name).iterdir())]
        for name in (*links, *empty, *names):
            if not TEMPORARY_NAME.fullmatch(name):
                yield (PurePosixPath(Path(parent).relative_to(folder).as_posix()) / name).as_posix()


def _keep_files(source: Path, target: Path, *, move: bool) -> list[str]:
    """Adds the user's files to another folder; returns the files whose names are taken there."""
    taken = []
    for name in files_of_user(source) if source.is_dir() else []:
        path, place = source / name, target / name
        if os.path.lexists(place):
            taken += [] if _is_same(path, place) else [name]
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            place.mkdir()
        elif move:
            path.rename(place)
        else:
            _link(path, place)
    return taken


def _is_same(path: Path, place: Path) -> bool:
    """Returns whether both are equal files, links or folders."""
    if path.is_symlink() or place.is_symlink():
        return path.is_symlink() and place.is_symlink() and path.readlink() == place.readlink()
    if path.is_dir() or place.is_dir():
        return path.is_dir() and place.is_dir()
    return path.samefile(place) or filecmp.cmp(path, place, shallow=False)


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path, place, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(path, place, follow_symlinks=False)
