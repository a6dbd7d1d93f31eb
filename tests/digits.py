"""What packs token ids beside the compiled core, or the same source built for a test that runs on the pure one."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from kvbus.compiled import core

ROOT = Path(__file__).parents[1]

Packing = Callable[[bytes, int, int], bytes | None]


@cache
def packed_digits() -> Packing:
    """The function; a test is skipped where it would have to be built and there is no C compiler."""
    if core() == "compiled":
        from kvbus.core.blocks.digits import packed_digits as built  # noqa: PLC0415 - not there otherwise

        return built
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    headers, source = sysconfig.get_paths()["include"], ROOT / "kvbus" / "core" / "blocks" / "digits.c"
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "digits.so")
        command = [*compiler, "-shared", "-fPIC", "-O3", "-Wall", "-Wextra", "-Werror", f"-I{headers}"]
        try:
            subprocess.run([*command, str(source), "-o", str(library)], check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no C compiler")
        spec = importlib.util.spec_from_file_location("digits", library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return cast("Packing", module.packed_digits)
