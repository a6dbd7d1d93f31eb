"""Tests that kvbus computes the same block hashes as `compute_block_hash_for_seq` in ai-dynamo-runtime 1.6.1.

The tests in `interop` compare the hashes of random tokens with Dynamo itself.
"""

from __future__ import annotations

import pytest

from kvbus.parts.outputs.dynamo.messages import blocks_of, images_in, namespace_in, seed, tokens_hash


@pytest.mark.parametrize(
    ("tokens", "lora", "namespace", "images", "expected"),
    [
        ([1, 2, 3, 4], None, None, [], 14643705804678351452),
        ([1, 2, 3, 4], "", "", [], 14643705804678351452),
        ([1, 2, 3, 4], "a", None, [], 17680866786467819158),
        ([1, 2, 3, 4], None, "s", [], 5728354201622468629),
        ([1, 2, 3, 4], "a", "s", [], 8794082693489998562),
        ([(1, 2), (2, 3), (3, 4), (4, 5)], None, None, [], 1914873892905420881),
        ([1, 2, 3, 4], None, None, [7, 3], 3497545641356191295),
    ],
)
def test_the_hash_of_a_block_is_that_of_dynamo(tokens, lora, namespace, images, expected):
    (block,) = blocks_of(tokens, 4)
    assert tokens_hash(block, seed(lora, namespace), images) == expected


def test_image_keys_among_the_extra_keys_are_recognized():
    digest = "00000000000000ff" + "ab" * 24
    assert images_in([digest, [digest, -3], "adapter", "", b"embedding", 5, None, ["", 0]], None) == [255, 255]
    assert images_in([digest, [digest, 0]], digest) == [255], "a bare one may be the adapter's name"
    (opaque,) = images_in([["image-0", 1]], None)
    assert opaque not in {0, 255}
    assert images_in(None, None) == []


def test_the_cache_namespace_among_the_extra_keys_is_recognized():
    assert namespace_in(["a", "dynamo-cache-salt:s"], "a") == "s"
    assert namespace_in(["dynamo-cache-salt:", "s", ["dynamo-cache-salt:s", 1]], None) is None
    assert namespace_in(None, None) is None
