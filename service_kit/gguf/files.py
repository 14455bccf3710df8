"""Names of GGUF files: which files are models, what they are called, and where the parts of a split one lie."""

import re
from pathlib import Path

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def is_gguf(path: Path) -> bool:
    """Whether this path is that of a GGUF file, which may be absent, by its name; a directory is none, whatever its name."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """What the model in a file is called: the file's name without its ending and without the number of a part."""
    match = _match_part(path)
    return match["name"] if match else path.stem


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model whose first file is `path`: those of `NAME-00001-of-00003.gguf` lie beside it."""
    match = _match_part(path)
    if match is None:
        return (path,)
    names = (f"{match['name']}-{number:05}-of-{match['count']}" for number in range(1, int(match["count"]) + 1))
    return tuple(path.with_name(name + path.suffix) for name in names)


def _match_part(path: Path) -> re.Match[str] | None:
    """A name like that of a part which cannot be one, as number 4 of 3, is any name."""
    match = _PART.fullmatch(path.stem)
    return match if match and 1 <= int(match["number"]) <= int(match["count"]) else None


def list_gguf_files(directory: Path) -> list[Path]:
    """The models in a directory that are GGUF files; of a split one its first part."""
    return [path for path in sorted(directory.iterdir()) if is_gguf(path) and part_paths(path)[0] == path]
