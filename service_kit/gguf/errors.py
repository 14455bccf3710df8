"""What is wrong with a GGUF file."""

from pathlib import Path

from service_kit.model_files_error import ModelFilesError


class GgufError(ModelFilesError):
    """A GGUF file that cannot be read; `field` names the metadata key, the tensor or the part of the file."""

    def __init__(self, path: Path, field: str, message: str) -> None:
        super().__init__(f"{path}: {field}: {message}")
        self.path = path
        self.field = field


class UnsupportedGgufError(GgufError):
    """A whole file of a kind that is not served; the text says what is, or what to do."""
