"""Tests that kvbus reads the files for TLS and authentication of a log, and reports mistakes in them."""

import json
import ssl

import pytest
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.common.errors import ConfigError
from kvbus.config import KafkaTopic, load
from kvbus.parts.log.location import KafkaLocation, check_files, location_of
from tests.security.certificates import Authority


@pytest.fixture
def files(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue("worker")
    password = tmp_path / "password"
    password.write_text("hunter2 \r\n")
    password.chmod(0o600)
    return {
        "tls_ca_file": authority.certificate,
        "tls_certificate_file": issued.certificate,
        "tls_key_file": issued.key,
        "username": "worker",
        "password_file": password,
    }


def test_a_location_without_files_has_no_options():
    assert KafkaLocation("kafka-0:9092").options() == {}


def test_credential_files_are_read_again_at_each_connection(files):
    place = KafkaLocation("kafka-0:9092", KafkaTopic(**files))
    assert place.options()["sasl_plain_password"] == "hunter2 "
    files["password_file"].write_text("hunter3")
    options = place.options()
    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("worker", "hunter3")
    context = options["ssl_context"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    nobody = KafkaLocation("kafka-0:9092", KafkaTopic(tls_ca_file=files["tls_ca_file"])).options()
    assert set(nobody) == {"security_protocol", "ssl_context"}
    assert nobody["security_protocol"] == "SSL"


def test_a_location_lists_the_addresses_of_all_servers():
    place = KafkaLocation("kafka-0:9092,[::1]:9093")
    assert list(place.addresses) == [("kafka-0", 9092), ("::1", 9093)]


def written(kind, keys):
    """Return a configuration with an output that writes to a log, and the path of the log's keys in the
    configuration.
    """
    output = {"type": kind, "endpoint": "tcp://k:1", kind: keys}
    return {"model": "m", "sources": [{"endpoint": "ipc:///e"}], "outputs": [output]}, f"outputs[0].{kind}"


def discovered(kind, keys):
    """Return a configuration that discovers the streams of a log, and the path of the log's keys in the
    configuration.
    """
    source = {"name": "fleet", "discover": {kind: {"endpoint": "tcp://k:1", **keys}}}
    output = {"endpoint": "tcp://*:5657", "layout": "per_topic", "topic": "kv@{source}"}
    return {"model": "m", "sources": [source], "outputs": [output]}, f"sources[0].discover.{kind}"


@pytest.mark.parametrize("kind", ["kafka", "nats", "redis"])
@pytest.mark.parametrize("side", [written, discovered])
@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("tls_ca_file", "hunter2", "holds no certificate"),
        ("tls_ca_file", None, "cannot be read"),
        ("tls_certificate_file", "hunter2", "cannot be used with its private key"),
        ("tls_certificate_file", None, "cannot be read"),
        ("tls_key_file", "hunter2", "cannot be used with its private key"),
        ("tls_key_file", None, "cannot be read"),
        ("password_file", "\n", "is empty"),
        ("password_file", None, "cannot be read"),
    ],
)
def test_check_names_a_wrong_credential_file_and_shows_no_secret(files, tmp_path, kind, side, name, content, wrong):
    data, at = side(kind, {key: str(value) for key, value in files.items()})
    config = tmp_path / "kvbus.yaml"
    config.write_text(json.dumps(data))
    assert CliRunner().invoke(main, ["check", "-c", str(config)]).exit_code == 0
    if content is None:
        files[name].unlink()
    else:
        files[name].write_text(content)
    done = CliRunner().invoke(main, ["check", "-c", str(config)])
    named = "tls_certificate_file" if name == "tls_key_file" and content is not None else name
    assert f"{at}.{named} = {files[named]}: " in done.output
    assert wrong in done.output
    without = CliRunner().invoke(main, ["check", "-c", str(config), "--without-keys"])
    assert (done.exit_code, without.exit_code) == (78, 0)
    for text in (done.output, without.output):
        assert "hunter2" not in text


def test_check_names_all_unusable_files_in_one_error(files):
    files["tls_ca_file"].unlink()
    files["password_file"].chmod(0o644)
    data, at = discovered("kafka", {key: str(value) for key, value in files.items()})
    with pytest.raises(ConfigError) as error:
        check_files(load(None, env={}, overrides=data))
    assert [problem.key for problem in error.value.problems] == [f"{at}.tls_ca_file", f"{at}.password_file"]


@pytest.mark.parametrize("name", ["tls_key_file", "password_file"])
def test_a_secret_file_that_other_users_can_read_is_refused(files, name):
    files[name].chmod(0o644)
    with pytest.raises(Exception, match="other users can read it"):
        KafkaLocation("kafka-0:9092", KafkaTopic(**files)).options()


def test_the_location_of_a_kafka_output_has_its_servers_and_topic():
    output = {"type": "kafka", "endpoint": "tcp://a:1", "kafka": {"topic": "t", "more_servers": ["tcp://b:2"]}}
    config = load(None, env={}, overrides={"model": "m", "sources": [{}], "outputs": [output]})
    place = location_of(config.outputs[0])
    assert (place.servers, place.topic, place.pointers) == ("a:1,b:2", "t", "t-pointers")


def test_the_location_of_a_redis_output_has_its_sentinels():
    keys = {"sentinel": "mymaster", "more_servers": ["tcp://[::1]:2"]}
    place = location_of(load(None, env={}, overrides=written("redis", keys)[0]).outputs[0])
    assert (list(place.addresses), place.keys.sentinel) == ([("k", 1), ("::1", 2)], "mymaster")


@pytest.mark.parametrize("side", [written, discovered])
def test_several_redis_servers_without_sentinel_are_refused(side):
    overrides, _ = side("redis", {"more_servers": ["tcp://b:2"]})
    with pytest.raises(ConfigError, match="sentinel: needed if more_servers is set"):
        load(None, env={}, overrides=overrides)
