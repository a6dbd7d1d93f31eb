"""What ``kvbus check`` says is open to whom."""

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


def said(source: dict[str, Any] | None = None, output: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    given = {
        "sources": [{"endpoint": "ipc:///e", **(source or {})}],
        "outputs": [{"endpoint": "ipc:///o", **(output or {})}],
    }
    return exposure(load(None, env={}, overrides={"model": "m", **given, **settings}))


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        ({}, ["http 127.0.0.1:9477: token ids and hashes for programs on this machine; the rest for this machine"]),
        (REMOTE, ["http 0.0.0.0:9477: token ids and hashes for programs on this machine; the rest for whoever reaches it"]),
        ({"http": "localhost:1"}, ["http localhost:1: token ids and hashes for programs on this machine; the rest for this machine"]),
        ({"http": None}, ["http: nobody reads anything, there is no port"]),
        (
            {**REMOTE, **TLS, "http_tokens_file": "/t", "http_open": "probes"},
            [
                "http 0.0.0.0:9477: token ids and hashes for programs on this machine and whoever has a token of /t; the probes and the page's files for whoever reaches it; the rest for those who may read token ids, and tokens for status"
            ],
        ),
        (
            {**REMOTE, "http_tokens_file": "/t"},
            [
                "http 0.0.0.0:9477: token ids and hashes for programs on this machine and whoever has a token of /t; the rest for whoever reaches it",
                "http 0.0.0.0:9477: tokens and token ids cross the network in clear without http_tls_certificate_file",
            ],
        ),
    ],
)  # fmt: skip
def test_http(settings: dict[str, Any], sentences: list[str]) -> None:
    assert [each for each in said(**settings) if each.startswith("http")] == sentences


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            {"type": "kafka", "endpoint": "tcp://k:9092"},
            "block hashes for whoever may read them there, in clear, and kvbus says to no server who it is (tcp://k:9092)",
        ),
        (
            {"type": "kafka", "endpoint": "tcp://k:9092", "kafka": {"tls_ca_file": "/a"}},
            "block hashes for whoever may read them there, encrypted, kvbus says to no server who it is (tcp://k:9092)",
        ),
        (
            {
                "type": "kafka",
                "endpoint": "tcp://k:9092",
                "kafka": {"tls_ca_file": "/a", "username": "w", "password_file": "/p"},
            },
            "block hashes for whoever may read them there, encrypted, kvbus as w by its password (tcp://k:9092)",
        ),
        (
            {
                "type": "kafka",
                "endpoint": "tcp://k:9092",
                "kafka": {"tls_ca_file": "/a", "tls_certificate_file": "/c", "tls_key_file": "/k"},
            },
            "block hashes for whoever may read them there, encrypted, kvbus by its certificate (tcp://k:9092)",
        ),
        ({}, "token ids for programs on this machine (ipc:///o)"),
        (
            {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://127.0.0.1:2"},
            "token ids for whoever reaches it, in clear (tcp://*:1)",
        ),
        ({"endpoint": "tcp://*:1", **CURVE}, "token ids for those whose key it knows, encrypted (tcp://*:1)"),
        ({"endpoint": "tcp://*:1", "token_ids": "drop"}, "block hashes for whoever reaches it, in clear (tcp://*:1)"),
    ],
)
def test_an_output(output: dict[str, Any], sentence: str) -> None:
    assert said(output=output)[1:] == [f"outputs[0] routers: {sentence}"]


@pytest.mark.parametrize(
    ("source", "sentences"),
    [
        ({}, []),
        ({"endpoint": "tcp://*:1", "bind": True}, ["whoever reaches it may publish as this engine (tcp://*:1)"]),
        ({"endpoint": "ipc:///e", "bind": True}, ["programs on this machine may publish as this engine (ipc:///e)"]),
        (
            {"endpoint": "tcp://*:1", "bind": True, **CURVE},
            ["those whose key it knows may publish as this engine (tcp://*:1)"],
        ),
    ],
)
def test_a_source(source: dict[str, Any], sentences: list[str]) -> None:
    assert said(source=source)[2:] == [f"sources[0] engine: {sentence}" for sentence in sentences]


def test_check_says_it() -> None:
    done = CliRunner().invoke(main, ["check", "--source", "ipc:///e", "--output", "tcp://*:5657"])
    assert "open: outputs[0] routers: token ids for whoever reaches it, in clear (tcp://*:5657)\n" in done.stderr
    assert "token ids for" not in done.stdout


@pytest.mark.parametrize(
    ("listen", "who"), [("0.0.0.0:80", "whoever reaches it"), ("[::1]:80", "programs on this machine")]
)
def test_the_front(listen: str, who: str) -> None:
    front = {"listen": listen, "engine": "http://127.0.0.1:8001"}
    assert said(front=front, output={"endpoint": "tcp://*:1"})[-1].startswith(
        f"front {listen}: the whole API of http://127.0.0.1:8001 for {who}, in clear"
    )
    calls = {"listen": listen, "engine": "127.0.0.1:50052"}
    assert said(front_grpc=calls, output={"endpoint": "tcp://*:1"})[-1].startswith(
        f"front_grpc {listen}: the whole API of 127.0.0.1:50052 for {who}, in clear"
    )
