"""A file of the state under XChaCha20-Poly1305, which libsodium has.

Each file has a random key of its own. Its header holds that key, sealed by the operator's key under a random nonce of
192 bits and bound to the rest of the header. Each frame is sealed by the file's key. Its nonce is its position in the
file: a file is written once, from its beginning on, by one process. So no nonce repeats, whatever happens, and a frame
opens only in its own file, at its own place and behind its own head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt,
)
from nacl.exceptions import CryptoError

from kvbus.daemon.state_file import SEAL_BYTES

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 24


class Seal:
    """The seal of one file.

    Args:
        key: the file's own.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, at: int, head: bytes, plain: bytes) -> bytes:
        """Seal what stands behind ``head`` in the frame at this position."""
        return crypto_aead_xchacha20poly1305_ietf_encrypt(plain, head, at.to_bytes(NONCE_BYTES, "big"), self._key)

    def open(self, at: int, head: bytes, sealed: bytes) -> bytes | None:
        """The reverse of :meth:`seal`; None if anything is not as it was."""
        return _opened(sealed, head, at.to_bytes(NONCE_BYTES, "big"), self._key)


def begin(key: bytes, head: bytes, random_bytes: Callable[[int], bytes]) -> tuple[bytes, Seal]:
    """Make the key of a new file; return it sealed, for the header that begins with ``head``, and its seal."""
    own, nonce = random_bytes(KEY_BYTES), random_bytes(NONCE_BYTES)
    return nonce + crypto_aead_xchacha20poly1305_ietf_encrypt(own, head, nonce, key), Seal(own)


def open_with(key: bytes, head: bytes, wrapped: bytes) -> Seal | None:
    """Return the seal of the file whose header has this; None if it is another key's."""
    own = _opened(wrapped[NONCE_BYTES:], head, wrapped[:NONCE_BYTES], key)
    return None if own is None else Seal(own)


def _opened(sealed: bytes, head: bytes, nonce: bytes, key: bytes) -> bytes | None:
    if len(sealed) < SEAL_BYTES:
        return None
    try:
        return crypto_aead_xchacha20poly1305_ietf_decrypt(sealed, head, nonce, key)
    except CryptoError:
        return None
