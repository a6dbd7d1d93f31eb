"""A ConfigMap or Secret volume as a kubelet mounts it."""

from __future__ import annotations

from pathlib import Path


class Volume:
    """A file of such a volume: ``kvbus.yaml`` -> ``..data/kvbus.yaml`` -> ``..N/kvbus.yaml``."""

    def __init__(self, directory: Path, text: str) -> None:
        self._directory = directory
        self._number = 0
        self.file = directory / "kvbus.yaml"
        self.swap(text)
        self.file.symlink_to(Path("..data", "kvbus.yaml"))

    def swap(self, text: str) -> None:
        """Replace the file's content atomically, by renaming the link to its directory."""
        before, self._number = f"..{self._number}", self._number + 1
        now = self._directory / f"..{self._number}"
        now.mkdir()
        (now / "kvbus.yaml").write_text(text)
        new = self._directory / "..data_tmp"
        new.symlink_to(now.name)
        new.rename(self._directory / "..data")
        if (self._directory / before / "kvbus.yaml").exists():
            (self._directory / before / "kvbus.yaml").unlink()
            (self._directory / before).rmdir()
