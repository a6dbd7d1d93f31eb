"""Tests for the part of the output of ``kvbus check`` that says who can reach which port."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.config import load
from kvbus.config.notes import exposure

TLS = {"http_tls_certificate_file": "/c", "http_tls_key_file": "/k"}
REMOTE = {"http": "0.0.0.0:9477"}
CURVE = {"curve_secret_key_file": "/s", "curve_client_keys": "/c"}


def access_sentences(
    source: dict[str, Any] | None = None, output: dict[str, Any] | None = None, **settings: Any
) -> list[str]:
    given = {
        "sources": [{"endpoint": "ipc:///e", **(source or {})}],
        "outputs": [{"endpoint": "ipc:///o", **(output or {})}],
    }
    return exposure(load(None, env={}, overrides={"model": "m", **given, **settings}))


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        ({}, ["http 127.0.0.1:9477: programs on this machine can read token ids and hashes; programs on this machine can read everything else"]),
        (REMOTE, ["http 0.0.0.0:9477: programs on this machine can read token ids and hashes; anyone who reaches it can read everything else"]),
        ({"http": "localhost:1"}, ["http localhost:1: programs on this machine can read token ids and hashes; programs on this machine can read everything else"]),
        ({"http": None}, ["http: off"]),
        (
            {**REMOTE, **TLS, "http_tokens_file": "/t", "http_open": "probes"},
            [
                "http 0.0.0.0:9477: programs on this machine and anyone with a token of /t can read token ids and hashes; anyone who reaches it can read the probes and the page's files; all other paths need the right to read token ids, or a token for the status"
            ],
        ),
        (
            {**REMOTE, "http_tokens_file": "/t"},
            [
                "http 0.0.0.0:9477: programs on this machine and anyone with a token of /t can read token ids and hashes; anyone who reaches it can read everything else",
                "http 0.0.0.0:9477: tokens and token ids cross the network unencrypted; set http_tls_certificate_file",
            ],
        ),
    ],
)  # fmt: skip
def test_check_describes_the_access_to_the_http_server(settings: dict[str, Any], sentences: list[str]) -> None:
    assert [each for each in access_sentences(**settings) if each.startswith("http")] == sentences


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            {"type": "kafka", "endpoint": "tcp://k:9092"},
            "anyone who may read the log can read block hashes, unencrypted, and kvbus does not log in (tcp://k:9092)",
        ),
        (
            {"type": "kafka", "endpoint": "tcp://k:9092", "kafka": {"tls_ca_file": "/a"}},
            "anyone who may read the log can read block hashes, encrypted, and kvbus does not log in (tcp://k:9092)",
        ),
        (
            {
                "type": "kafka",
                "endpoint": "tcp://k:9092",
                "kafka": {"tls_ca_file": "/a", "username": "w", "password_file": "/p"},
            },
            "anyone who may read the log can read block hashes, encrypted, and kvbus logs in as w by a password (tcp://k:9092)",
        ),
        (
            {
                "type": "kafka",
                "endpoint": "tcp://k:9092",
                "kafka": {"tls_ca_file": "/a", "tls_certificate_file": "/c", "tls_key_file": "/k"},
            },
            "anyone who may read the log can read block hashes, encrypted, and kvbus logs in by its certificate (tcp://k:9092)",
        ),
        ({}, "programs on this machine can read token ids (ipc:///o)"),
        (
            {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://127.0.0.1:2"},
            "anyone who reaches it can read token ids, unencrypted (tcp://*:1)",
        ),
        (
            {"endpoint": "tcp://*:1", **CURVE},
            "anyone whose key is in curve_client_keys can read token ids, encrypted (tcp://*:1)",
        ),
        (
            {"endpoint": "tcp://*:1", "token_ids": "drop"},
            "anyone who reaches it can read block hashes, unencrypted (tcp://*:1)",
        ),
    ],
)
def test_check_describes_the_access_to_an_output(output: dict[str, Any], sentence: str) -> None:
    assert access_sentences(output=output)[1:] == [f"outputs[0] routers: {sentence}"]


@pytest.mark.parametrize(
    ("source", "sentences"),
    [
        ({}, []),
        ({"endpoint": "tcp://*:1", "bind": True}, ["anyone who reaches it can publish as this engine (tcp://*:1)"]),
        ({"endpoint": "ipc:///e", "bind": True}, ["programs on this machine can publish as this engine (ipc:///e)"]),
        (
            {"endpoint": "tcp://*:1", "bind": True, **CURVE},
            ["anyone whose key is in curve_client_keys can publish as this engine (tcp://*:1)"],
        ),
    ],
)
def test_check_describes_the_access_to_a_source(source: dict[str, Any], sentences: list[str]) -> None:
    assert access_sentences(source=source)[2:] == [f"sources[0] engine: {sentence}" for sentence in sentences]


def test_check_prints_the_access_to_outputs_on_stderr() -> None:
    done = CliRunner().invoke(main, ["check", "--source", "ipc:///e", "--output", "tcp://*:5657"])
    assert (
        "access: outputs[0] routers: anyone who reaches it can read token ids, unencrypted (tcp://*:5657)\n"
        in done.stderr
    )
    assert "can read" not in done.stdout


@pytest.mark.parametrize(
    ("listen", "who"), [("0.0.0.0:80", "anyone who reaches it"), ("[::1]:80", "programs on this machine")]
)
def test_check_describes_the_access_to_the_api_through_the_front(listen: str, who: str) -> None:
    front = {"listen": listen, "engine": "http://127.0.0.1:8001"}
    assert access_sentences(front=front, output={"endpoint": "tcp://*:1"})[-1].startswith(
        f"front {listen}: {who} can use the complete API of http://127.0.0.1:8001, unencrypted"
    )
    calls = {"listen": listen, "engine": "127.0.0.1:50052"}
    assert access_sentences(front_grpc=calls, output={"endpoint": "tcp://*:1"})[-1].startswith(
        f"front_grpc {listen}: {who} can use the complete API of 127.0.0.1:50052, unencrypted"
    )
