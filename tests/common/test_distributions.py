"""Tests for an environment with two installed distributions that contain the same package."""

from __future__ import annotations

import zipfile

import pytest

from kvbus import MixedVersionsError, check_versions


@pytest.mark.parametrize("names", [[], ["kvbus-0.1.0"], ["kvbus_client-0.1.0", "kvbus-0.1.0"], ["kvbus_demo-9-1"]])
def test_distributions_with_the_same_version_are_accepted(tmp_path, names):
    for name in names:
        (tmp_path / f"{name}.dist-info").mkdir()
    check_versions(tmp_path / "kvbus")


def test_distributions_with_different_versions_are_refused(tmp_path):
    for name in ("kvbus-0.1.0", "kvbus_client-0.2.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    with pytest.raises(
        MixedVersionsError,
        match=r"kvbus 0\.1\.0 and kvbus-client 0\.2\.0 share files in .*uninstall both, install one",
    ):
        check_versions(tmp_path / "kvbus")


def test_the_version_check_accepts_a_zipped_wheel(tmp_path):
    wheel = tmp_path / "kvbus.whl"
    zipfile.ZipFile(wheel, "w").close()
    check_versions(wheel / "kvbus")
