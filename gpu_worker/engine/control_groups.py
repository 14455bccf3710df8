"""Where this process stands in the kernel's control groups, versions 1 and 2 (man cgroups(7)). Pure but for reading files."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """One mounted hierarchy: `root` is the group that its mount point shows."""

    root: PurePosixPath
    mount_point: PurePosixPath
    file_system: str
    options: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroups:
    """Directories of the groups that bind this process, its own and all visible ancestors, for one controller. Every one of
    them limits it: the smallest limit wins."""

    v1: tuple[Path, ...]
    v2: tuple[Path, ...]


def control_groups(controller: str, *, root: Path = Path("/")) -> ControlGroups:
    """The groups of this process for `controller` ("cpu", "memory"). `root` is where the file system is looked up.

    Both versions may be there: in hybrid mode each controller belongs to one of them, and the other has no files for it.
    """
    memberships = _read(root / "proc/self/cgroup").splitlines()
    mounts = [mount for line in _read(root / "proc/self/mountinfo").splitlines() if (mount := _mount(line)) is not None]
    v1: list[Path] = []
    v2: list[Path] = []
    for line in memberships:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            v2 += _directories(path, [each for each in mounts if each.file_system == "cgroup2"], root)
        elif controller in controllers.split(","):
            of_controller = [each for each in mounts if each.file_system == "cgroup" and controller in each.options]
            v1 += _directories(path, of_controller, root)
    return ControlGroups(v1=tuple(v1), v2=tuple(v2))


def _mount(line: str) -> _Mount | None:
    """A line of /proc/self/mountinfo (proc(5)); None for what is no control group."""
    before, _, after = line.partition(" - ")
    fields, (file_system, _, *options) = before.split(" "), [*after.split(" "), "", ""]
    if file_system not in {"cgroup", "cgroup2"}:
        return None
    return _Mount(
        root=PurePosixPath(_unescape(fields[3])),
        mount_point=PurePosixPath(_unescape(fields[4])),
        file_system=file_system,
        options=frozenset(options[0].split(",")),
    )


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _directories(path: str, mounts: list[_Mount], root: Path) -> list[Path]:
    """From the process's own group up to the mount point, on the first mount that shows it."""
    group = PurePosixPath(path)
    for mount in mounts:
        if group.is_relative_to(mount.root):
            return _upwards(root / mount.mount_point.relative_to("/"), group.relative_to(mount.root))
    # In a container the path may be the host's, or lie above the namespace's root ("/../.."): what the mount point shows
    # is then the nearest group that can be seen.
    return [root / mount.mount_point.relative_to("/") for mount in mounts[:1]]


def _upwards(mount_point: Path, group: PurePosixPath) -> list[Path]:
    if ".." in group.parts:
        return [mount_point]
    return [mount_point / group, *(mount_point / parent for parent in group.parents if group.parts)]


def _read(path: Path) -> str:
    """Empty when there is no such file: no control group, no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""
