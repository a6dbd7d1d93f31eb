"""The keys of ``state_key_file``: the first one seals, the others open what was sealed before.

A line is a key of 64 hexadecimal digits, or the word ``clear``, which stands for no seal. So ``clear`` behind a key
takes over a state that was not sealed yet, and ``clear`` before it writes a sealed state in clear again. Where there is
no line for a state, kvbus refuses it and does not start: it neither forgets what is there nor believes what somebody
else has put there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvbus.common.errors import StateKeyError
from kvbus.transport.curve import KeyFileError, read_private

if TYPE_CHECKING:
    from kvbus.daemon.state_seal import Seal

CLEAR: Final = "clear"
_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class StateKeys:
    """What the state is written with, and what it may be read with.

    Attributes:
        first: what seals; None: files are written in clear.
        all: every key.
        clear: a file in clear may be read.
    """

    first: bytes | None = field(default=None, repr=False)
    all: tuple[bytes, ...] = field(default=(), repr=False)
    clear: bool = True

    def begin(self, head: bytes, random_bytes: Callable[[int], bytes]) -> tuple[bytes, Seal | None]:
        """Return what a new file's header has behind ``head``, and the file's seal; nothing and None in clear."""
        if self.first is None:
            return b"", None
        from kvbus.daemon import state_seal  # noqa: PLC0415 - needs libsodium

        return state_seal.begin(self.first, head, random_bytes)

    def open(self, name: str, head: bytes, wrapped: bytes) -> Seal | None:
        """Return the seal of a file; None for one in clear, where ``wrapped`` is empty.

        Raises:
            StateKeyError: none of the keys opens it.
        """
        if not wrapped:
            if self.clear:
                return None
            raise StateKeyError(
                f"{name} is not sealed, and state_key_file has no line `{CLEAR}`: add one behind the key, which takes "
                "the state over, or remove the state with `kvbus state wipe`"
            )
        if not self.all:
            raise StateKeyError(f"{name} is sealed: set state_key_file, or remove the state with `kvbus state wipe`")
        from kvbus.daemon import state_seal  # noqa: PLC0415 - needs libsodium

        for key in self.all:
            seal = state_seal.open_with(key, head, wrapped)
            if seal is not None:
                return seal
        raise StateKeyError(
            f"{name} is sealed with a key that is not in state_key_file: add that key as one more line, or remove the "
            "state with `kvbus state wipe`"
        )


NO_KEYS: Final = StateKeys()
"""Nothing is sealed."""


def read_state_keys(path: Path | None) -> StateKeys:
    """Read a key file. Only its owner and its group may have access to it.

    Raises:
        KeyFileError: it cannot be used; the text never quotes it.
    """
    if path is None:
        return NO_KEYS
    found: list[bytes | None] = []
    for number, line in enumerate(read_private(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text != CLEAR and not _KEY.fullmatch(text):
            raise KeyFileError(
                f"line {number} is no key: 64 hexadecimal digits, as `openssl rand -hex 32` writes, or `{CLEAR}`"
            )
        found.append(None if text == CLEAR else bytes.fromhex(text))
    keys = tuple(key for key in found if key is not None)
    if not keys:
        raise KeyFileError("holds no key: 64 hexadecimal digits, as `openssl rand -hex 32` writes")
    if len(set(found)) != len(found):
        raise KeyFileError("holds a line twice")
    return StateKeys(found[0], keys, None in found)
