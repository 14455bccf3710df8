"""The models this gateway serves: what lies in its models directory, looked at again every few seconds."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

from gateway.tokenization import TextEncoder
from service_kit.errors import NotFoundError, Reason
from service_kit.gguf.files import is_gguf
from service_kit.logging import get_logger
from service_kit.model_manifest import ModelFilesError, ModelManifest, list_models, read_manifest
from service_kit.token_bytes import UnsupportedTokenizerError, read_token_bytes
from state_store.tenants import Tenant

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A manifest with its loaded tokenizer."""

    manifest: ModelManifest
    encoder: TextEncoder
    token_bytes: tuple[bytes, ...]
    """By token id; empty for a kind of tokenizer whose tokens cannot be turned into bytes one by one."""
    path: Path
    """The model directory or GGUF file."""


class ModelRegistry:
    """Models by name. Mutable state: the current mapping, replaced as a whole by `rescan`, and the files that it cannot
    read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._models: Mapping[str, ServedModel] = MappingProxyType({})
        self._complaints: frozenset[str] = frozenset()
        self._refused_files: dict[Path, tuple[ModelManifest, str]] = {}

    def get(self, name: str, tenant: Tenant) -> ServedModel:
        """Raises NotFoundError for an unknown model and one that the tenant may not use alike."""
        model, is_allowed = self._models.get(name), tenant.may_use(name)
        if model is None or not is_allowed:
            raise NotFoundError("no such model", reason=Reason.MODEL_NOT_FOUND)
        return model

    def token_bytes(self, name: str, revision: str) -> tuple[bytes, ...]:
        """Bytes by token id of one revision; none when this gateway has another one, or no longer the model."""
        model = self._models.get(name)
        return model.token_bytes if model is not None and model.manifest.revision == revision else ()

    def models_of(self, tenant: Tenant) -> list[ServedModel]:
        """By name; those that the tenant may use."""
        return [model for model in self.models() if tenant.may_use(model.manifest.model)]

    def models(self) -> list[ServedModel]:
        """By name."""
        return [self._models[name] for name in sorted(self._models)]

    async def rescan(self) -> None:
        """Takes up new and changed models, drops removed ones. A model that cannot be read stays as it was before,
        so that a copy in progress takes nothing away."""
        self._models, complaints = await asyncio.to_thread(self._load)
        for complaint in complaints - self._complaints:
            _log.warning("model_directory_refused", error=complaint)
        self._complaints = complaints

    async def run(self, interval: timedelta) -> None:
        """Rescans for ever."""
        while True:
            await asyncio.sleep(interval.total_seconds())
            await self.rescan()

    def _load(self) -> tuple[Mapping[str, ServedModel], frozenset[str]]:
        loaded: dict[str, ServedModel] = {}
        complaints: set[str] = set()
        for path in list_models(self._directory):
            model = self._load_model(path, complaints)
            if model is None:
                continue
            if model.manifest.model in loaded:
                complaints.add(f"{path}: model {model.manifest.model} stands in another directory as well")
            loaded.setdefault(model.manifest.model, model)
        return MappingProxyType(loaded), frozenset(complaints)

    def _load_model(self, path: Path, complaints: set[str]) -> ServedModel | None:
        known = next((model for model in self._models.values() if model.path == path), None)
        try:
            manifest = read_manifest(path)
            if known is not None and known.manifest == manifest:
                return known
            refused_manifest, reason = self._refused_files.get(path, (None, ""))
            if refused_manifest == manifest:
                complaints.add(reason)
                return known
            return self._load_content(path, manifest)
        except ModelFilesError as error:
            complaints.add(str(error))
            return known

    def _load_content(self, path: Path, manifest: ModelManifest) -> ServedModel:
        """Raises ModelFilesError. A GGUF file with the same manifest has the same content: it is not tried again."""
        try:
            encoder = TextEncoder(path)
            return ServedModel(manifest=manifest, encoder=encoder, token_bytes=_token_bytes(path), path=path)
        except ModelFilesError as error:
            if is_gguf(path):
                self._refused_files[path] = manifest, str(error)
            raise


def _token_bytes(path: Path) -> tuple[bytes, ...]:
    try:
        return read_token_bytes(path)
    except UnsupportedTokenizerError:
        return ()
