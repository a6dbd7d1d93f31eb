import pytest

from kvbus.core.blocks.chunk import Chunk, Meta
from kvbus.core.normalizing.reblocking import derive, derive_chunk
from kvbus.core.wire.encoding import encode_value

FIRST = 7713946297145647563
SECOND = 10578922383325983977
FIRST_BYTES = "a731f2feccc7c63e6cdfa6613bcd95127dc0f7960771fe3163cce44772b87b58"


def meta(block_size=16, **fields):
    return Meta(
        **{
            "block_size": block_size,
            "lora_id": None,
            "lora_name": None,
            "medium": None,
            "group_idx": None,
            "kind": None,
            "window": None,
            **fields,
        }
    )


def chunk(hashes, tokens, size, *, keys=None, **fields):
    raw = None if keys is None else bytes(encode_value(keys))
    return Chunk(tuple(hashes), None, bytes(encode_value(tokens)), meta(size, **fields), raw)


def test_derived_hashes_do_not_change_between_versions():
    """kvbus derives fixed hashes for the parts of divided blocks, because two kvbus, also of two versions, must
    agree.
    """
    assert derive(None, [1, 2, 3, 4], b"", as_bytes=False) == FIRST
    assert derive(FIRST, [5, 6, 7, 8], b"", as_bytes=False) == SECOND
    assert derive(None, [1, 2, 3, 4], b"", as_bytes=True) == bytes.fromhex(FIRST_BYTES)


def test_different_blocks_have_different_derived_hashes():
    names = {
        derive(None, [1, 2], b"", as_bytes=False),
        derive(1, [1, 2], b"", as_bytes=False),
        derive(None, [2, 1], b"", as_bytes=False),
        derive(None, [(1, 2)], b"", as_bytes=False),
        derive(None, [1, 2], b"salt", as_bytes=False),
        derive(b"\x01", [1, 2], b"", as_bytes=False),
    }
    assert len(names) == 6


def test_derived_hashes_do_not_depend_on_the_engines_block_size():
    tokens = list(range(96))
    whole = derive_chunk(chunk([1], tokens, 96), 16, None)
    assert derive_chunk(chunk([1, 2], tokens, 48), 16, None) == whole
    assert derive_chunk(chunk([1, 2, 3, 4, 5, 6], tokens, 16), 16, None) == whole


@pytest.mark.parametrize(
    "fields", [{"lora_id": 1}, {"lora_name": "a"}, {"cache_salt": bytes(encode_value("s"))}, {"keys": [["image"]]}]
)
def test_salt_adapter_and_keys_change_every_derived_hash(fields):
    tokens = list(range(32))
    base = derive_chunk(chunk([1], tokens, 32), 16, None)
    other = derive_chunk(chunk([1], tokens, 32, **fields), 16, None)
    assert not set(base) & set(other)


def test_the_medium_does_not_change_derived_hashes():
    tokens = list(range(32))
    names = {tuple(derive_chunk(chunk([1], tokens, 32, medium=m), 16, None)) for m in (None, "GPU", "CPU_PINNED")}
    assert len(names) == 1


@pytest.mark.parametrize("keys", [5, "abc", {"a": 1}, [], None])
def test_keys_that_are_not_a_list_do_not_change_derived_hashes(keys):
    tokens = list(range(32))
    assert derive_chunk(chunk([1], tokens, 32, keys=keys), 16, None) == derive_chunk(chunk([1], tokens, 32), 16, None)
