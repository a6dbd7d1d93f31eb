from typing import Final

import pytest

from kvbus.core.types import DEVICE_MEDIUM, MEDIA, PREFIX_KINDS, Filtered, Reason, Tier, medium_key

SEEN: Final = {
    Tier.DEVICE: ["GPU", "DEVICE"],
    Tier.HOST: ["CPU", "CPU_PINNED", "CPU_TIER1"],
    Tier.DISK: ["CPU_TIER2", "FS", "DISK", "NVME", "STORAGE"],
    Tier.EXTERNAL: ["OBJ", "EXTERNAL", "REMOTE", "NETWORK", "SHARED"],
}


def test_every_medium_an_engine_names_has_a_tier():
    assert {name: tier for tier, names in SEEN.items() for name in names} == MEDIA


@pytest.mark.parametrize("name", [None, "GPU", "gpu", "Gpu", "DEVICE", "device"])
def test_every_name_of_the_device_has_the_same_key(name):
    assert medium_key(name) == DEVICE_MEDIUM == "GPU"


@pytest.mark.parametrize("name", [name for name, tier in MEDIA.items() if tier is not Tier.DEVICE])
def test_the_key_of_another_medium_is_its_name_in_capitals(name):
    assert medium_key(name) == medium_key(name.lower()) == name


@pytest.mark.parametrize("name", ["", " ", "GPU ", "HBM", "CPU_TIER3", "\x00", "gpu\n"])
def test_an_unknown_medium_has_no_key(name):
    assert medium_key(name) is None


def test_reasons_are_unique_and_valid_metric_labels():
    labels = [*Reason, *Filtered]
    assert len(set(labels)) == len(labels)
    assert all(label.isidentifier() and label == label.lower() for label in labels)


def test_the_group_kinds_with_a_prefix_are_those_of_full_attention():
    assert set(PREFIX_KINDS) == {"full_attention", "mla_attention", "sink_full_attention"}
