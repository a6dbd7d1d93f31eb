"""Compiles modules of the core into the wheel, from the sources that the wheel has too: mypyc.

The hook is off unless HATCH_BUILD_HOOK_ENABLE_CUSTOM is set. Its table in pyproject.toml lists the modules. What kvbus
does with the stamp is in kvbus/common/compiled.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")


class CompiledCore(BuildHookInterface[Any]):
    """Adds extension modules and the stamp to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; hatchling calls it before it makes the wheel."""
        if version != "standard":
            return  # an editable install runs what the tree has
        root = Path(self.root)
        work = root / "build" / "compiled"
        shutil.rmtree(work, ignore_errors=True)
        built = work / "lib"
        _compile(root, self.config["modules"], work, built)
        stamp = built / "kvbus" / "compiled.json"
        stamp.write_text(json.dumps({"suffix": SUFFIX, "sources": _digests(root)}, indent=1) + "\n")
        build_data["force_include"] |= {
            str(path): str(path.relative_to(built)) for path in sorted(built.rglob("*")) if path.is_file()
        }
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _compile(root: Path, modules: list[str], work: Path, built: Path) -> None:
    """Extension modules below ``built``, and the library that they share."""
    from mypyc.build import mypycify  # noqa: PLC0415 - hatchling reads this module before it installs them
    from setuptools import Distribution  # noqa: PLC0415

    os.chdir(root)
    sources = [module.replace(".", "/") + ".py" for module in modules]
    options = ["--config-file=", f"--cache-dir={work / 'mypy'}", *sources]
    extensions = mypycify(options, opt_level="3", debug_level="0", target_dir=str(work / "c"), group_name="kvbus")
    command = Distribution({"name": "kvbus", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(built), str(work / "o")
    command.ensure_finalized()
    command.run()


def _digests(root: Path) -> dict[str, str]:
    """SHA-256 of every source of the core: constants of modules that stay interpreted are compiled in."""
    found = sorted((root / "kvbus" / "core").rglob("*.py"))
    return {
        path.relative_to(root / "kvbus").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found
    }
