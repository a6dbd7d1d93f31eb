import pytest
from msgspec import structs

from kvbus.core.wire.profiles import PROFILES, Profile, Wire, encode, fold
from kvbus.core.wire.schema import AllBlocksCleared
from tests.doubles.payloads import payload, plain_all, removed, store, unpack
from tests.typed import well_formed


def test_the_profiles_are_those_of_the_configuration():
    assert {
        name: (p.wire.encoding, p.framing, p.filled_replay, p.late_replay, p.clears, p.topics)
        for name, p in PROFILES.items()
    } == {
        "vllm": ("map", "4", True, True, "rank", "any"),
        "dynamo": ("map", "4", False, True, "rank", "any"),
        "dynamo-plane": ("map", "4", True, True, "rank", "any"),
        "llm-d": ("map", "4", True, False, "pod", "pod and model"),
        "llm-d-sglang": ("array", "4", True, False, "pod", "pod and model"),
        "aibrix": ("array", "4", False, True, "pod or nothing", "any"),
        "sglang": ("map", "3", True, True, "rank", "any"),
        "vllm-router": ("map", "4", False, True, "rank", "empty"),
        "smg": ("map", "4", False, True, "connection", "any"),
        "kthena": ("array", "4", False, True, "pod", "kv-events"),
        "mooncake": ("map", "4", True, True, "rank", "any"),
    }


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_without_tokens_changes_every_event(name):
    profile = PROFILES[name].without_tokens()
    assert profile.wire.by_event
    assert profile == structs.replace(PROFILES[name], wire=profile.wire)
    assert PROFILES[name].hashes_tokens == (name != "vllm")


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_an_encoded_batch_is_an_array_of_three_elements(encoding):
    assert unpack(encode(Wire(encoding), [], 1.5, 3)) == [1.5, [], 3]


def test_positional_events_with_groups_have_the_lengths_of_vllm_0_20():
    batch = well_formed(payload(store([1], group=0), removed([1], group=0), {"type": "AllBlocksCleared"}))
    assert [len(event) for event in unpack(encode(Wire("array"), batch.events, 1.0, 0))[1]] == [10, 4, 1]


def test_positional_events_without_groups_have_the_lengths_of_vllm_0_10_2():
    batch = well_formed(payload(store([1]), removed([1]), {"type": "AllBlocksCleared"}))
    assert [len(event) for event in unpack(encode(Wire("array"), batch.events, 1.0, 0))[1]] == [7, 3, 1]


def test_the_default_profile_is_the_newest_engine():
    assert Profile() == PROFILES["vllm"]
    assert AllBlocksCleared() == well_formed(encode(Wire("array"), [AllBlocksCleared()], 1.0, 0)).events[0]


def test_positional_events_have_every_field_at_its_position():
    event = store([1, 2], 3, group=4, lora_id=5, lora_name="a", extra_keys=[None, ["x"]], novelty=1)
    (stored, gone) = well_formed(payload(event, removed([1], group=4))).events
    assert unpack(encode(Wire("array"), [stored, gone], 1.0, 0))[1] == [
        ["BlockStored", [1, 2], 3, event["token_ids"], 16, 5, "GPU", "a", [None, ["x"]], 4],
        ["BlockRemoved", [1], "GPU", 4],
    ]


HASH = bytes(range(32))


def sent(profile, *events):
    return plain_all(unpack(encode(PROFILES[profile].wire, well_formed(payload(*events)).events, 1.0, 0))[1])


class TestDynamo:
    def test_dynamo_gets_byte_hashes_as_the_integers_of_vllm(self):
        number = int.from_bytes(HASH[-8:], "big")
        assert fold(HASH) == number
        tokens = [1] * 16
        assert sent("dynamo", store([HASH], HASH, tokens=tokens), removed([HASH])) == plain_all(
            [store([number], number, tokens=tokens), removed([number])]
        )

    @pytest.mark.parametrize(
        ("medium", "wanted"), [("FS", "DISK"), ("OBJ", "EXTERNAL"), ("CPU", "CPU"), ("GPU", "GPU")]
    )
    def test_dynamo_gets_known_names_for_unknown_media(self, medium, wanted):
        assert sent("dynamo", store([1], medium=medium), removed([1], medium=medium)) == plain_all(
            [store([1], medium=wanted), removed([1], medium=wanted)]
        )

    def test_encoding_for_dynamo_does_not_change_the_event(self):
        events = well_formed(payload(store([HASH], HASH, medium="FS"))).events
        before = plain_all(events)
        encode(PROFILES["dynamo"].wire, events, 1.0, 0)
        assert plain_all(events) == before


class TestLlmD:
    @pytest.mark.parametrize("kind", [{}, {"kv_cache_spec_kind": None}])
    def test_llm_d_gets_a_kind_for_a_group_without_one(self, kind):
        (stored, gone) = sent("llm-d", store([1], group=0, **kind), removed([1], group=0))
        assert stored["kv_cache_spec_kind"] == "full_attention"
        assert gone == plain_all([removed([1], group=0)])[0]

    def test_llm_d_gets_known_kinds_and_events_without_groups_unchanged(self):
        events = [store([1], group=0, kv_cache_spec_kind="mla_attention"), store([2])]
        assert sent("llm-d", *events) == plain_all(events)


def test_mooncake_gets_events_without_group_numbers():
    events = [store([1], group=0), removed([1], group=0), store([2])]
    assert sent("mooncake", *events) == plain_all([store([1]), removed([1]), store([2])])


@pytest.mark.parametrize("profile", ["vllm", "llm-d", "sglang", "vllm-router", "smg", "mooncake"])
def test_other_profiles_get_the_events_unchanged(profile):
    events = [store([HASH], HASH, medium="FS"), removed([HASH], medium="OBJ")]
    assert sent(profile, *events) == plain_all(events)


def test_profiles_with_the_same_encoding_have_equal_wires():
    assert len({PROFILES[name].wire for name in ("vllm-router", "smg", "sglang")}) == 1
