"""A ConfigMap or Secret as a kubelet mounts it."""

from __future__ import annotations

from pathlib import Path


class Volume:
    """One file of its volume: ``kvbus.yaml`` -> ``..data/kvbus.yaml`` -> ``..N/kvbus.yaml``."""

    def __init__(self, directory: Path, text: str) -> None:
        self._directory = directory
        self._number = 0
        self.file = directory / "kvbus.yaml"
        self.swap(text)
        self.file.symlink_to(Path("..data", "kvbus.yaml"))

    def swap(self, text: str) -> None:
        """Give the file another content, all at once: the new one is behind a link that is renamed."""
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
