"""Install the example output type as an installer would: one module and two files of package metadata."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("kvbus_lines.py")


def install(directory: Path, driver: str = "kvbus_lines") -> None:
    """Write the files that make ``type: lines`` available to ``directory``, a directory on the import path.

    Args:
        directory: directory to write to.
        driver: dotted name of the driver's module.
    """
    module = directory.joinpath(*driver.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(SOURCE.read_text())
    info = directory / "kvbus_lines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbus-lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvbus.outputs]\nlines = {driver}:LinesOutput\n")
