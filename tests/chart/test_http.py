"""Tests for HTTP access to kvbus in the chart: Secrets with tokens, and the HTTP or HTTPS scheme of probes and
monitors.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.charts import load, render

ALL: dict[str, Any] = {
    "tlsSecret": "a-tls",
    "tokensSecret": "a-tokens",
    "open": "probes",
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def test_a_release_without_secrets_has_plain_http_probes_and_no_volume() -> None:
    release = render({})
    assert {release.kvbus[probe]["httpGet"].get("scheme") for probe in PROBES} == {None}
    assert not release.all("ClusterRoleBinding")
    assert not any(volume["name"].startswith("kvbus-http") for volume in release.pod["spec"]["volumes"])


def test_secrets_are_mounted_at_the_paths_of_the_configuration() -> None:
    release = render({"kvbus": {"http": ALL}})
    config, mounts = (
        load(release.one("ConfigMap")["data"]["kvbus.yaml"]),
        {each["name"]: each["mountPath"] for each in release.kvbus["volumeMounts"]},
    )
    volumes = {each["name"]: each for each in release.pod["spec"]["volumes"]}
    for name, secret, key, file in (
        ("kvbus-http-tls", "a-tls", "http_tls_certificate_file", "tls.crt"),
        ("kvbus-http-tls", "a-tls", "http_tls_key_file", "tls.key"),
        ("kvbus-http-tokens", "a-tokens", "http_tokens_file", "tokens"),
    ):
        assert config[key] == f"{mounts[name]}/{file}"
        assert volumes[name]["secret"] == {"secretName": secret, "defaultMode": 0o440}
    assert config["http_open"] == "probes"


def test_probes_and_monitors_use_https_if_kvbus_uses_tls() -> None:
    given = {"enabled": True, "endpoint": {"tlsConfig": {"insecureSkipVerify": True}}}
    for http in ({"http": ALL}, {"config": {"http_tls_certificate_file": "/c", "http_tls_key_file": "/k"}}):
        release = render({"kvbus": http, "monitoring": {"podMonitor": given}})
        assert {release.kvbus[probe]["httpGet"]["scheme"] for probe in PROBES} == {"HTTPS"}
        (endpoint,) = release.one("PodMonitor")["spec"]["podMetricsEndpoints"]
        assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
        assert "https://localhost:9477/sources" in release.notes


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"http": {"tokensSecret": "a"}, "config": {"http_tokens_file": "/t"}}, "follows from kvbus.http.tokensSecret"),
        ({"config": {"http_open": "probes"}}, "set kvbus.http.open"),
    ],
)
def test_contradictory_values_for_http_are_refused(values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(Exception, match=wrong):
        render({"kvbus": values})
