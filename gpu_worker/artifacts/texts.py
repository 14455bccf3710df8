"""The texts that ship with the worker: what quantization calibrates on, and what perplexity is measured on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from service_kit.model_manifest import ModelFilesError

_DIRECTORY = Path(__file__).parent / "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedText:
    """A text whose content is fixed, because published figures depend on it."""

    file: str
    sha256: str

    def read(self) -> str:
        """Raises ModelFilesError when the file is not the one that the hash names."""
        path = _DIRECTORY / self.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelFilesError(f"{path}: not readable: {error}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise ModelFilesError(f"{path}: another text than the expected one (sha256 {found})")
        return content.decode()


CALIBRATION = ShippedText(
    file="calibration.txt", sha256="8a20fcfced974eacd7ed472d3a803f0bffca6fcea3753cc59ea46f7a862f06be"
)
EVALUATION = ShippedText(
    file="evaluation.txt", sha256="45869492950bc47a13795a072ec2398e62472de5ed13ad70c0f69855e7fac81e"
)
