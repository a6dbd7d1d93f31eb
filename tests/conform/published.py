"""Import modules of published engines without installing the engines. This module needs no kvbus.

``.ci/engines.sh`` has extracted the modules from the engines' wheels. They import other modules of their engine, which
are absent. A stand-in replaces each absent module: it provides every name, but nothing that works.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}


class _StandIn(ModuleType):
    # The decoders read hashes by this type, which is that of vllm.v1.core.kv_cache_utils.
    ExternalBlockHash = bytes | int

    @staticmethod
    def init_logger(name: str) -> Any:
        import logging  # noqa: PLC0415 - of its own, not of the engine's

        return logging.getLogger(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace  # for example in place of a configuration, of which the modules read no value


class _StandIns(MetaPathFinder, Loader):
    """An import finder that provides a stand-in for each module that is not installed.

    Python asks it only after all other finders.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in {*MODULES, "psutil"}:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


def load(directory: str) -> Any:
    """Import an engine's module of KV events from a directory such as ``vllm-0.33.0``."""
    sys.path.insert(0, directory)
    sys.meta_path.append(_StandIns())
    return importlib.import_module(MODULES[Path(directory).name.partition("-")[0]])
