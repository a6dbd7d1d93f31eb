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
def test_a_device_is_a_device_whatever_it_is_called(name):
    assert medium_key(name) == DEVICE_MEDIUM == "GPU"


@pytest.mark.parametrize("name", [name for name, tier in MEDIA.items() if tier is not Tier.DEVICE])
def test_other_media_keep_their_own_name_in_capitals(name):
    assert medium_key(name) == medium_key(name.lower()) == name


@pytest.mark.parametrize("name", ["", " ", "GPU ", "HBM", "CPU_TIER3", "\x00", "gpu\n"])
def test_an_unknown_medium_has_no_key(name):
    assert medium_key(name) is None


def test_labels_are_bounded_and_fit_for_a_metric():
    labels = [*Reason, *Filtered]
    assert len(set(labels)) == len(labels)
    assert all(label.isidentifier() and label == label.lower() for label in labels)


def test_kinds_that_carry_a_prefix():
    assert set(PREFIX_KINDS) == {"full_attention", "mla_attention", "sink_full_attention"}
