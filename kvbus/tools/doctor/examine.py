"""The examination of a configuration by doctor: it probes all endpoints in parallel, each with a timeout.

The engines that the configuration discovers are probed like configured engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
from msgspec import structs

from kvbus.config import Config, FoundSource, SourceConfig, SourceStream, further_ranks
from kvbus.core.findings import bus as catalogue
from kvbus.core.findings.engine import API_UNUSABLE, HASHES_DIFFER
from kvbus.daemon.discovery import discoverer_of
from kvbus.daemon.found import Listed, found_findings, with_found
from kvbus.daemon.keys import Keys, output_domain, source_domain
from kvbus.parts.discovery.contract import Carrier, DiscoveryError
from kvbus.parts.log.follower import OTHER_SCHEMA
from kvbus.tools.asking import Login
from kvbus.tools.doctor import bus as buses
from kvbus.tools.doctor import machine
from kvbus.tools.doctor.bus import Bus
from kvbus.tools.doctor.findings import Report, Seen
from kvbus.tools.doctor.machine import holder
from kvbus.tools.doctor.outputs import OutputProber, understood
from kvbus.tools.doctor.probes import Looked, Prober, differing_roots
from kvbus.tools.doctor.sources import SourceJudge
from kvbus.transport import engine_api

SECONDS: Final = 15.0
"""Maximum seconds to wait for the first list of engines from a discovery. A discovery also has its own timeouts."""

_INDEX: Final = re.compile(r"^sources\[(\d+)\]")


async def find(config: Config) -> tuple[Config, Report]:
    """Find the engines of every ``discover`` entry of a configuration.

    Return the configuration with these engines as sources, and a report about the discoveries.
    """
    report = Report()
    entries = {i: source for i, source in enumerate(config.sources) if source.discover is not None}
    asked = await asyncio.gather(*(_ask(i, source, report) for i, source in entries.items()))
    found = {source.name: listed for source, listed in zip(entries.values(), asked, strict=True)}
    outcome = with_found(config, found, ())
    report.add(found_findings(config, found, outcome.left_out))
    return outcome.config, report


async def _ask(index: int, source: SourceConfig, report: Report) -> Listed:
    key, listed = f"sources[{index}].discover", Listed()
    try:
        discoverer = discoverer_of(source, asyncio.Event())
        async with asyncio.timeout(SECONDS), aclosing(discoverer.watch()) as sets:
            engines = await anext(sets)
    except (DiscoveryError, TimeoutError) as error:
        report.add([catalogue.DISCOVERY_FAILS(at=key, name=source.name, why=str(error) or "no answer")])
        return listed
    listed.take(engines, 0.0)
    names = ", ".join(sorted(listed.engines)) or "no engine"
    report.seen.append(Seen(key, source.name, f"finds {names}"))
    if not engines:
        report.add([catalogue.NO_ENGINE_FOUND(at=key, where=f'the discovery "{source.name}" lists no engine')])
    if not isinstance(discoverer, Carrier):
        return listed
    if unread := discoverer.counts[OTHER_SCHEMA]:
        report.add([catalogue.LOG_OTHER_SCHEMA(at=key, name=source.name, count=unread)])
    return Listed()  # a log carries the batches of its engines, so there is no endpoint to dial


def in_words_of(config: Config, with_engines: Config, report: Report) -> Report:
    """Return a copy of a report whose configuration keys are those of the user's file.

    The report is about a configuration in which the found engines replace the ``discover`` entries. So its positions in
    ``sources`` differ from the positions in the file.

    Args:
        config: the configuration of the user's file.
        with_engines: the configuration with the found engines.
        report: the report about ``with_engines``.
    """
    sections = config.sections(with_engines.sources)

    def key(of: str) -> str:
        return config.as_written(_INDEX.sub(lambda match: sections[int(match[1])], of))

    return Report(
        [structs.replace(each, key=key(each.key)) for each in report.findings],
        [replace(each, key=key(each.key)) for each in report.seen],
    )


T = TypeVar("T")

AT_ONCE: Final = 128
"""Maximum number of publishers that are probed at the same time. Each probe needs a few file descriptors."""

Progress = Callable[[str, bool], None]
"""A function that is called when a probe begins or ends, with the name of the probe and whether it has ended."""


async def examine_bus(
    url: str,
    *,
    timeout: float,  # noqa: ASYNC109 - of each endpoint
    login: Login | None = None,
) -> Report:
    """Return a report of the problems that a running bus has found itself.

    doctor does not connect to the endpoints of the bus, because they may not be reachable from this machine.
    """
    bus = await buses.ask(url, timeout, login)
    if not bus.runs:
        return Report([catalogue.NO_BUS(what=bus.problem)])
    report = buses.judge(bus)
    report.seen += buses.seen(bus)
    return report


async def examine(
    config: Config,
    *,
    timeout: float,  # noqa: ASYNC109 - of each endpoint
    history: bool = False,
    router: str | None = None,
    progress: Progress = lambda _what, _over: None,
) -> Report:
    """Probe every endpoint of a configuration, including the endpoints of discovered engines. Return the report.

    If a bus runs this configuration, its own findings are included. ``router`` is the name of a router's profile.
    If it is given, kvbus also checks whether this router can decode the events of the outputs.
    """
    with_engines, report = await find(config)
    looked = await _Examination(with_engines, timeout, history=history, progress=progress).run()
    report.merge(in_words_of(config, with_engines, looked))
    if router is not None:
        report.merge(understood(config, router))
    return report


class _Examination:
    def __init__(self, config: Config, seconds: float, *, history: bool, progress: Progress) -> None:
        self._config = config
        self._seconds = seconds
        self._history = history
        self._progress = progress
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._report = Report()
        self._streams = config.streams()

    async def run(self) -> Report:
        report, config = self._report, self._config
        report.add(machine.library())
        keys, findings = machine.files(config)
        report.add(findings)
        bus, running = await self._bus()
        report.add(machine.state(config, running=bool(running)))
        looked = await self._sources(
            keys, may_bind=running is False, spoke=bus.spoke if bus is not None else frozenset()
        )
        await self._outputs(keys, running, looked)
        if bus is not None and bus.runs:
            found = frozenset(finding.key for finding in report.findings)
            report.merge(buses.judge(bus, keys=found))
        return report

    async def _bus(self) -> tuple[Bus | None, bool | None]:
        """Ask the bus at the configured HTTP address. Return the bus, and whether it runs this configuration.

        The bus is None if no bus answers, or if it runs another configuration. The second value is None if doctor
        cannot find out whether a bus runs this configuration.
        """
        address = self._config.http_address
        if address is None or address[1] == 0:
            return None, None
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])  # noqa: S104 - recognised
        certificate = self._config.http_tls_certificate_file
        url = f"{'https' if certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{address[1]}"
        login = Login() if certificate is None else Login(context=_pinned(certificate))
        bus = await self._shown(f"http {url}", buses.ask(url, self._seconds, login))
        if not bus.listens and not bus.runs:
            return None, False
        if not bus.runs:
            who = holder(address[1])
            self._report.add([catalogue.HTTP_TAKEN(what=f"{bus.problem}{f': {who}' if who else ''}")])
            return None, False
        streams = {stream.endpoint for stream in self._streams}
        theirs = {source.endpoint for source in bus.sources}
        if streams != theirs:
            names = ", ".join(sorted(theirs)) or "nothing"
            self._report.add([catalogue.OTHER_CONFIGURATION(url=url, theirs=names)])
            return None, None
        return bus, True

    async def _sources(self, keys: Keys, *, may_bind: bool, spoke: frozenset[str]) -> list[Looked]:
        config, curve = self._config, {}
        for index, source in enumerate(config.sources):
            known = keys.get(source_domain(source.name))
            if known is not None:
                curve[index] = known
        prober = Prober(config, curve, timeout=self._seconds, history=self._history, may_bind=may_bind)
        streams = [
            stream
            for stream in self._streams
            if config.sources[stream.source_index].curve_secret_key_file is None or stream.source_index in curve
        ]
        beyond = further_ranks(config)
        looks = [self._look(prober, stream) for stream in (*streams, *beyond.values())]
        found = await asyncio.gather(*looks)
        looked, behind = found[: len(streams)], dict(zip(beyond, found[len(streams) :], strict=True))
        for index in range(len(config.sources)):
            ranks = [each for each in looked if each.stream.source_index == index]
            if ranks:
                judge = SourceJudge(config, index, ranks, behind.get(index), self._history, spoke)
                self._report.merge(judge.report())
        for one, other in differing_roots([(each.stream.label, each.heard) for each in looked]):
            self._report.add([HASHES_DIFFER(one=one, other=other)])
        await asyncio.gather(*(self._api(index) for index in range(len(config.sources))))
        return looked

    async def _look(self, prober: Prober, stream: SourceStream) -> Looked:
        async with self._gate:
            return await self._shown(f"{stream.label} {stream.endpoint}", prober.look(stream))

    async def _api(self, index: int) -> None:
        source = self._config.sources[index]
        api = source.api
        if api is None or isinstance(source, FoundSource):
            return
        why = "its /metrics has no vllm:engine_sleep_state"
        try:
            async with asyncio.timeout(self._seconds), engine_api.session() as client:
                if await self._shown(f"api {api}", engine_api.is_asleep(client, api)) is not None:
                    return
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or "no answer"
        self._report.add([API_UNUSABLE(at=f"sources[{index}]", api=api, why=why)])

    async def _outputs(self, keys: Keys, running: bool | None, looked: list[Looked]) -> None:
        topics = {each.stream.index: next(iter(each.heard.topics)) for each in looked if each.heard.topics}
        probers = [
            OutputProber(
                self._config,
                index,
                keys.get(output_domain(output.name)),
                timeout=self._seconds,
                running=running,
                topics=topics,
                gate=self._gate,
            )
            for index, output in enumerate(self._config.outputs)
            if output.type == "zmq" or output.log is not None
        ]
        for index, output in enumerate(self._config.outputs):
            if output.type != "zmq" and output.log is None:
                facts = {"output": output.name, "type": output.type}
                self._report.add([catalogue.OUTPUT_NOT_PROBED(at=f"outputs[{index}]", **facts)])
        for report in await asyncio.gather(
            *(self._shown(f"outputs[{number}]", prober.look()) for number, prober in enumerate(probers))
        ):
            self._report.merge(report)

    async def _shown(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        self._progress(what, False)
        try:
            return await work
        finally:
            self._progress(what, True)


def _pinned(certificate: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts only this certificate. The host name in the certificate is not checked.

    If the file cannot be read, the context trusts no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    # OSError includes ssl.SSLError. `machine.files` reports a file that cannot be read.
    with contextlib.suppress(OSError):
        context.load_verify_locations(certificate)
    return context
