"""A mounted ConfigMap or Secret volume of Kubernetes, with the symbolic links that a kubelet creates."""

from __future__ import annotations

from pathlib import Path


class Volume:
    """A mounted volume with one file.

    ``kvbus.yaml`` links to ``..data/kvbus.yaml``. ``..data`` links to the directory ``..N``, whose number N rises with
    each change of the content.
    """

    def __init__(self, directory: Path, text: str) -> None:
        self._directory = directory
        self._number = 0
        self.file = directory / "kvbus.yaml"
        self.swap(text)
        self.file.symlink_to(Path("..data", "kvbus.yaml"))

    def swap(self, text: str) -> None:
        """Replace the file's content atomically, as a kubelet does: write a new directory, and rename a link to it."""
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
