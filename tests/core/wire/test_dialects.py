import pytest

from kvbus.core.wire.dialects import Sniffer, sniff
from tests.doubles.payloads import cleared, pack, payload, store
from tests.wire.captures import CAPTURES, load

TOKENS = list(range(16))
ARRAY = ["BlockStored", [1], None, TOKENS, 16, None, "GPU", None, None, 0, "full_attention", None]

OLD_ARRAY = "vllm-0.9.1..0.10.0 | sglang-0.4.7..0.5.8"
MEDIUM_ARRAY = "vllm-0.10.2..0.13 | sglang-0.5.9..0.5.17"
BARE_MAP = "vllm-0.24.. | sglang-0.5.20.. | dynamo | trt-llm"
CAPTURED = {
    "lmcache056_vllm032": {"vllm-0.24..0.33", BARE_MAP},
    "sglang0510_positional": {MEDIUM_ARRAY},
    "sglang0523_eagle_bigram": {BARE_MAP},
    "sglang0523_hicache": {BARE_MAP},
    "sglang0523_map": {BARE_MAP},
    "sglang0523_page1": {BARE_MAP},
    "sglang0523_radix_eagle": {BARE_MAP},
    "sglang0523_radix_page16": {BARE_MAP},
    "sglang0523_radix_salts": {"sglang-0.5.20..0.5.23", BARE_MAP},
    "sglang0523_salt_session": {"sglang-0.5.20..0.5.23", BARE_MAP},
    "sglang055_collisions": {OLD_ARRAY},
    "sglang055_eagle": {OLD_ARRAY},
    "sglang055_positional": {OLD_ARRAY},
    "syn_mooncake_rfc1527": {"rfc1527 (mooncake)"},
    "syn_sglang0523_tiers_disk": {BARE_MAP},
    "syn_sglang_39991": {"sglang (sglang#39991)", "sglang-0.5.20..0.5.23", BARE_MAP},
    "syn_sglang_variable": {OLD_ARRAY},
    "syn_trtllm_native": {BARE_MAP},
    "syn_vllm020_positional": {"vllm-0.20"},
    "syn_vllm023_positional": {"vllm-0.22..0.23"},
    "syn_vllm090_positional": {"vllm-0.9.0"},
    "syn_vllm_two_granularities": {BARE_MAP},
    "vllm0110_positional_bytes": {MEDIUM_ARRAY},
}
MAPS_OF_0_33 = [name for name in CAPTURES if "vllm033" in name]


def names_of(capture):
    return {sniff(message.payload) for message in load(capture)} - {None}


@pytest.mark.parametrize("name", CAPTURED)
def test_each_capture_has_its_dialect_name(name):
    assert names_of(name) == CAPTURED[name]


def test_every_capture_has_an_expected_dialect():
    assert {*CAPTURED, *MAPS_OF_0_33} == set(CAPTURES)


@pytest.mark.parametrize("name", MAPS_OF_0_33)
def test_vllm_0_33_without_null_fields_looks_like_vllm_0_24(name):
    assert names_of(name) == {"vllm-0.24..0.33"}


@pytest.mark.parametrize(
    ("length", "name"),
    [
        (6, "vllm-0.9.1..0.10.0 | sglang-0.4.7..0.5.8"),
        (7, "vllm-0.10.2..0.13 | sglang-0.5.9..0.5.17"),
        (8, "vllm-0.14..0.16"),
        (9, "vllm-0.18"),
        (10, "vllm-0.20"),
        (11, "array/11"),
        (12, "vllm-0.22..0.23"),
    ],
)
def test_the_length_of_a_positional_store_shows_its_dialect(length, name):
    assert sniff(payload(ARRAY[:length])) == name


def test_a_salted_positional_store_is_of_sglang():
    assert sniff(payload([*ARRAY[:7], {"cache_salt": "s"}])) == "sglang-0.5.18..0.5.19"


def test_a_batch_that_is_a_map_is_of_vllm_dev():
    assert sniff(pack({"ts": 1.0, "events": [], "data_parallel_rank": 0})) == "vllm-dev (map batch)"


def test_a_map_store_without_further_fields_fits_several_dialects():
    assert sniff(payload(store([1]))) == "vllm-0.24.. | sglang-0.5.20.. | dynamo | trt-llm"


@pytest.mark.parametrize("eighth", [b"\xa1\xff", b"\x81\x80\x01"], ids=["not utf-8", "a map as a key"])
def test_an_undecodable_eighth_element_does_not_stop_dialect_detection(eighth):
    event = pack(ARRAY[:7])
    body = b"\x93\xcb" + bytes(8) + b"\x91" + b"\x98" + event[1:] + eighth + b"\x00"
    assert sniff(body) in ("vllm-0.14..0.16", "sglang-0.5.18..0.5.19")


def test_the_dialect_of_a_stream_is_that_of_its_newest_store():
    sniffer = Sniffer()
    for sent, name in (
        (payload(cleared()), None),
        (payload(ARRAY[:9]), "vllm-0.18"),
        (payload(["BlockRemoved", [1]]), "vllm-0.18"),
        (payload(store([1])), BARE_MAP),
        (payload(ARRAY[:9]), "vllm-0.18"),
        (b"\x93", "vllm-0.18"),
    ):
        sniffer.see(sent)
        assert sniffer.name == name
