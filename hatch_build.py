"""Compiles the worker's CPU kernels into the wheel, and beside the sources of an editable install."""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernelsHook(BuildHookInterface[Any]):
    """With a C++ compiler the wheel gets the library and this platform's tag; without one it is pure Python, and the worker
    uses torch's slower code and logs why.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _load(Path(self.root) / "gpu_worker" / "kernels" / "build.py")
        try:
            library: Path = build.compile_library()
        except build.CompileError as error:
            build.LIBRARY.unlink(missing_ok=True)  # it may be of other sources
            self.app.display_warning(f"{version} build without CPU kernels, the worker will be slower: {error}")
            return
        self.app.display_info(f"compiled {library}")
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        # The library is reached through ctypes, so that it fits any Python, but only this platform.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(path: Path) -> ModuleType:
    """The module at `path`, without the packages around it: they are not installed while they are built."""
    spec = importlib.util.spec_from_file_location("cpu_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
