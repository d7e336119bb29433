"""Published files, in a folder of the user's or downloaded. What is read is checked by its md5."""

import gzip
import lzma
import os
import shlex
import sys
import tarfile
import zlib
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pooch

FOLDER = "METAFOP_DATA"  # the environment variable for where no --data is given
TARS = (".tar.gz", ".tar.xz")
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


class Archive(NamedTuple):
    """A file as it is published, and the md5 of every file in it, unpacked, by name."""

    folder: str  # that holds it, in the folder of all data
    name: str
    md5: str
    addresses: tuple[str, ...]  # tried one after the other
    contents: dict[str, str]


def named(data: Path | None) -> Path | None:
    """Return the folder of all data that the user named: by --data, else by METAFOP_DATA, else None."""
    folder = data or (Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None)
    if folder is not None and folder.is_file():
        raise SystemExit(f"{folder} is a file. Name the folder that holds the data, by --data or {FOLDER}.")
    return folder


def cache() -> Path:
    """Return the folder of all data where the user named none."""
    return Path(pooch.os_cache("metafop"))


def read(archive: Archive, folder: Path | None) -> dict[str, bytes]:
    """Return the unpacked files of an archive by name, from a folder of all data, else from the user's cache.

    They may be there as published, packed in another way, or unpacked. Only the cache is written to.
    """
    if folder is None:
        return fetch(archive, cache())
    found, faults = search(archive, folder)
    raise_if_missing(archive, folder, faults)
    return found


def fetch(archive: Archive, folder: Path) -> dict[str, bytes]:
    """Return the unpacked files of an archive by name, after a download if one has no intact copy here."""
    found, faults = search(archive, folder)
    if faults:
        download(archive, folder)
        found, faults = search(archive, folder)
        raise_if_missing(archive, folder, faults)
    return found


def search(archive: Archive, folder: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files that have an intact copy here, by name, and what is wrong with every other one."""
    found: dict[str, bytes] = {}
    faults = {name: f"{folder / archive.folder / name} is missing" for name in archive.contents}
    for path, names in copies(archive, folder):
        if not names & faults.keys():
            continue
        try:
            contents = unpack(path, names & faults.keys())
        except UNREADABLE as error:
            faults |= dict.fromkeys(names & faults.keys(), f"{path} cannot be read to its end ({error})")
            continue
        for name, content in contents.items():
            seen = md5(content, usedforsecurity=False).hexdigest()
            if seen == archive.contents[name]:
                found[name] = content
                del faults[name]
            else:
                faults[name] = f"{path} is altered: the md5 of {name} is {seen}"
    return found, faults


def copies(archive: Archive, folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield every file that may hold a copy, and of what: unpacked ones first, as they are read fastest."""
    for form in ("{}", "{}.gz"):
        for name in archive.contents:
            for path in sorted((folder / archive.folder).rglob(form.format(name))):
                yield path, {name}
    for suffix in TARS:
        for path in sorted((folder / archive.folder).rglob(f"*{suffix}")):
            yield path, set(archive.contents)


def unpack(path: Path, names: set[str]) -> dict[str, bytes]:
    """Return the content of those of the named files that are in a tar; of the one that another file is."""
    if not path.name.endswith(TARS):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return dict.fromkeys(names, file.read())
    contents = {}
    with tarfile.open(path, "r:xz" if path.suffix == ".xz" else "r:gz") as tar:
        for member in tar:  # in their order: to go back, the tar would be unpacked again
            name, file = PurePosixPath(member.name).name, tar.extractfile(member)
            if name in names and file is not None:
                contents[name] = file.read()
    return contents


def raise_if_missing(archive: Archive, folder: Path, faults: dict[str, str]) -> None:
    """Name the first of the files that have no intact copy, if there are any, and how to fetch it."""
    if faults:
        name, fault = next(iter(faults.items()))
        command = shlex.join(["python", "-m", "experiments", "fetch", "--data", str(folder)])
        raise SystemExit(
            f"{fault}; the md5 of {name}, unpacked, should be {archive.contents[name]}. "
            f"Fetch it by: {command}"
        )


def download(archive: Archive, folder: Path) -> None:
    """Put an archive where it belongs in a folder of all data, from the first address that gives it."""
    path = folder / archive.folder
    bar = sys.stderr.isatty()  # elsewhere, as in a log, it would be a line for every bit of it
    failures = []
    for address in archive.addresses:
        try:
            pooch.retrieve(address, f"md5:{archive.md5}", archive.name, path, progressbar=bar)
            return
        except (PermissionError, FileExistsError, NotADirectoryError):
            raise SystemExit(
                f"Cannot write to {path}. Name a folder that can be written by --data or {FOLDER}."
            ) from None
        except ValueError:  # of pooch, for another md5
            failures.append(f"{address} (it gives another file)")
        except OSError as error:  # those of requests are among them
            failures.append(f"{address} ({error.strerror or type(error).__name__})")
    raise SystemExit(
        f"Cannot fetch {path / archive.name} (md5 {archive.md5}) from {' or '.join(failures)}. Get it "
        f"elsewhere, put it into {archive.folder}/ of a folder, and name that folder by --data or {FOLDER}."
    )
