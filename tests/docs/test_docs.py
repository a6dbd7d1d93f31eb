"""Tests that README.md and the pages of reference agree with the code."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvbus import config
from kvbus.cli import main
from kvbus.common.errors import ConfigError
from kvbus.core import source_spec
from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived
from kvbus.core.normalizing import block_size
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.relay import Relay
from kvbus.core.sequencing import answers, epoch, fingerprints, request, sequencer
from kvbus.core.sequencing.phases import State
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import MEDIA, Filtered, Reason
from kvbus.core.wire.frames import ReplayRequest
from kvbus.core.wire.profiles import PROFILES, needs
from kvbus.state import sqlite as marks
from kvbus.tools.demo.show import render_verdict
from kvbus.tools.demo.stage import Row
from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.terminal import UNICODE
from tests.docs import measured, metrics, phases, routers, runbook
from tests.doubles.answers import answer_of
from tests.system.test_captures import CASES
from tests.wire.captures import CAPTURES, load, truth

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted(path for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md")
README = (ROOT / "README.md").read_text()
PROTOCOL = (ROOT / "docs" / "PROTOCOL.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
RECORDINGS = (ROOT / "tests" / "wire" / "data" / "README.md").read_text()


def first_cells(text: str) -> dict[str, list[str]]:
    """Return the rows of a page's tables by the name in code format that is in the first cell of the row."""
    rows = {}
    for line in text.splitlines():
        found = re.match(r"\| `([^`]+)`(?:, `[^`]+`)* \|", line)
        if found:
            rows[found[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return rows


def number(text: str) -> int:
    return int(text.replace(",", ""))


def section(text: str, title: str) -> str:
    """Return the text of a page below a heading, up to the next heading of the same or a higher level."""
    level = title.index(" ")
    return re.split(rf"^#{{1,{level}}} ", text.split(f"\n{title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def definitions(path: Path) -> set[str]:
    """Return the names that a module defines: functions, classes, constants, and `Class.method`."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, functions):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names.update(f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions))
    return names


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def topic_is_good(profile: str, topic: str) -> bool:
    output = {"name": "out", "endpoint": "tcp://127.0.0.1:1", "profile": profile, "topic": topic}
    overrides = {"sources": [{"endpoint": "tcp://127.0.0.1:2"}], "outputs": [output], "worker": "w:1", "model": "m"}
    try:
        config.load(None, env={}, overrides=overrides)
    except ConfigError:
        return False
    return True


def cut_of(stream: OutputStream, _: int) -> StateSnapshot:
    return StateSnapshot(49, [], stream.profile.wire)


class TestProtocol:
    def test_the_protocol_page_lists_exactly_the_reasons_of_validation(self):
        rows = first_cells(section(PROTOCOL, "## Validation"))
        assert set(rows) == {*Reason, *Filtered}

    def test_the_protocol_page_lists_every_medium_with_its_tier(self):
        tiers: dict[Any, Any] = {}
        for line in section(PROTOCOL, "## Media and tiers").splitlines():
            names, _, tier = line.strip("|").partition("|")
            tiers |= dict.fromkeys(re.findall(r"`(\w+)`", names), tier.split("(")[0].strip())
        del tiers["GPU"]
        assert tiers | {"GPU": "device"} == {name: str(tier) for name, tier in MEDIA.items()}

    def test_the_protocol_page_lists_every_profile_with_encoding_and_framing(self):
        rows = first_cells(section(PROTOCOL, "### Profiles"))
        told = {name: (cells[1], cells[2]) for name, cells in rows.items()}
        assert told == {name: (f"{profile.wire.encoding}s", profile.framing) for name, profile in PROFILES.items()}

    def test_the_protocol_page_lists_the_needs_of_each_profile(self):
        rows = first_cells(section(PROTOCOL, "### Profiles"))
        assert {name: cells[4] for name, cells in rows.items()} == {
            name: "; ".join(needs(profile)) for name, profile in PROFILES.items()
        }

    def test_the_protocol_page_lists_the_valid_topics_of_each_profile(self):
        for name, cells in first_cells(section(PROTOCOL, "### Profiles")).items():
            takes = [topic for topic in ("kv", "kv@{worker}@{model}", "kv-events") if topic_is_good(name, topic)]
            said = {(): "no topic", ("kv@{worker}@{model}",): "kv@POD@MODEL", ("kv-events",): "the topic kv-events"}
            assert said.get(tuple(takes), "") in cells[4], name
            assert ("topic" in cells[4]) == (tuple(takes) in said), name

    def test_the_protocol_page_lists_the_profiles_that_fill_up_replay_answers(self):
        for name, cells in first_cells(section(PROTOCOL, "### Profiles")).items():
            stream = OutputStream(b"", PROFILES[name], Journal(1, 10**6), heartbeat=0.0, rank=0)
            for _ in range(50):
                stream.append(b"batch", 0.0)
            filled = {}
            for start in (0, 10):
                request = ReplayRequest([b"id", b""], start)
                answer = answer_of(stream, request, partial(cut_of, stream))
                messages = list(answer.messages())
                seqs = [int.from_bytes(message[-2], "big") for message in messages[:-1]]
                filled[start] = seqs == list(range(start, 50))
            assert filled == {
                0: cells[3] == "every answer",
                10: cells[3] in {"every answer", "those from a seq above 0"},
            }, name

    def test_the_protocol_page_lists_every_dialect_with_form_and_framing(self):
        told = {}
        for line in section(PROTOCOL, "## Dialects").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 6 and cells[4].startswith("`"):
                told[cells[4].strip("`")] = (cells[1].startswith("map"), cells[3])
        assert set(told) == set(DIALECTS)
        for name, (maps, framing) in told.items():
            assert maps == DIALECTS[name].maps, name
            assert framing in (DIALECTS[name].framing, ""), name

    def test_every_capture_proves_a_dialect(self):
        assert set(re.findall(r"`(\w+)`", section(PROTOCOL, "## Dialects"))) >= set(CAPTURES)

    def test_the_recordings_page_lists_the_results_of_every_capture(self):
        run = section(RECORDINGS, "## What was run")
        assert "| " + " | ".join(f"`{case}`" for case in CASES) + " |" in run
        rows = {name: cells for name, cells in first_cells(run).items() if len(cells) > 2}
        assert set(rows) == set(CAPTURES)
        for name, cells in rows.items():
            assert cells[3:] == [str(len(load(name))), str(len(truth(name))), *["exact"] * len(CASES)], name

    def test_the_recordings_page_explains_every_case(self):
        run = section(RECORDINGS, "## What was run")
        assert re.findall(r"^\* `(\w+)`:", run, re.MULTILINE) == list(CASES)

    def test_the_protocol_pages_example_is_a_batch_that_kvbus_sends(self):
        left = section(PROTOCOL, "## What kvbus sends")
        dump = bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} )+)", left, re.MULTILINE)))
        (told,) = re.findall(r"```json\n(.+?)```", left, re.DOTALL)
        batch = msgspec.json.decode(told)
        assert msgspec.msgpack.decode(dump) == batch
        source = SourceSpec("engine", 0, replay=False)
        relay = Relay([source], [OutputSpec("routers", PROFILES["vllm"], [None])])
        commands = relay.handle(BatchReceived(0, [b"", bytes(8), msgspec.msgpack.encode(batch)]), 1.0)
        assert [command.payload for command in commands if isinstance(command, Publish)] == [dump]


class TestArchitecture:
    def test_the_architecture_page_lists_every_package(self):
        told = set(first_cells(section(ARCHITECTURE, "## Packages")))
        packages = {f"kvbus/{path.name}/" for path in (ROOT / "kvbus").iterdir() if (path / "__init__.py").exists()}
        assert told == packages

    def test_the_table_of_decisions_names_existing_files_and_definitions(self):
        """In the table of decisions, each word in code format is a file of kvbus, or a name that the file before it
        defines.
        """
        missing, found = [], 0
        for row in section(ARCHITECTURE, "## Where it is decided").splitlines():
            defined: set[str] = set()
            for name in re.findall(r"`([\w./]+)`", row):
                if name.endswith(".py"):
                    defined = definitions(ROOT / "kvbus" / name)
                elif name in defined:
                    found += 1
                else:
                    missing.append(name)
        assert missing == []
        assert found > 30

    def test_the_architecture_page_lists_every_state_of_a_source(self):
        assert set(first_cells(section(ARCHITECTURE, "## The sequencer"))) == set(State)

    def test_the_architecture_page_has_the_phases_of_the_sequencer(self):
        assert phases.page() in section(ARCHITECTURE, "## The sequencer"), "python -m tests.docs.phases"

    def test_the_architecture_page_has_the_states_of_a_router(self):
        assert routers.page() in ARCHITECTURE, "python -m tests.docs.routers"

    def test_the_runbook_has_every_finding_of_the_catalogue(self):
        assert runbook.findings() in runbook.PAGE.read_text(), "python -m tests.docs.runbook"

    def test_the_metrics_page_has_the_metrics_of_the_code(self):
        text = metrics.PAGE.read_text()
        assert metrics.rendered(text) == text, "python -m tests.docs.metrics"

    def test_pages_name_constants_with_their_present_value(self):
        told = re.findall(r"`([A-Z_]+)` \((\d+)\)", ARCHITECTURE)
        assert len(told) >= 5
        told += re.findall(r"`([A-Z_]+)` \((\d+)\)", "".join(page.read_text() for page in DECISIONS))
        for name, value in told:
            modules = (sequencer, source_spec, answers, request, epoch, fingerprints, block_size, marks)
            assert {getattr(m, name) for m in modules if hasattr(m, name)} == {int(value)}, name


class TestDecisions:
    def test_there_are_at_most_22_decision_pages(self):
        assert len(DECISIONS) <= 22

    def test_the_index_of_decisions_lists_every_page_by_its_title(self):
        index = (ROOT / "docs" / "decisions" / "README.md").read_text()
        rows = re.findall(r"^\| \[([^]]+)\]\(([\w-]+\.md)\) \| [^|]+ \|$", index, re.MULTILINE)
        assert sorted((name, title) for title, name in rows) == [
            (page.name, page.read_text().partition("\n")[0].removeprefix("# ")) for page in DECISIONS
        ]

    @pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.stem)
    def test_a_decision_page_is_short_and_has_all_sections(self, page):
        text = page.read_text()
        lines = text.splitlines()
        assert 100 <= len(text.split()) <= 400
        assert [line for line in lines if line.startswith("## ")] == [
            "## The question",
            "## What was weighed",
            "## The decision",
            "## What it costs",
            "## When to look at it again",
        ]


@pytest.mark.parametrize("path", [ROOT / "docs" / "ARCHITECTURE.md", *DECISIONS], ids=lambda path: path.stem)
def test_architecture_pages_have_short_lines_outside_tables(path):
    assert [line for line in path.read_text().splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_every_test_named_in_a_document_exists():
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for document in DOCUMENTS:
        assert set(re.findall(r"`(test_\w+)`", document.read_text())) <= defined, document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_in_documents_have_a_target(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{document.name}: {link}"


class TestContributing:
    def test_tests_that_contributing_names_for_a_profile_list_every_profile(self):
        text = section((ROOT / "CONTRIBUTING.md").read_text(), "## Adding an output profile")
        named = re.findall(r"`(tests/[\w/]+\.py)`", text)
        assert named
        for path in named:
            assert set(PROFILES) <= set(re.findall(r'"([\w-]+)"', (ROOT / path).read_text())), path


class TestReadme:
    def test_every_make_target_exists(self):
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        others = "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "MAINTAINERS.md"))
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README + others, re.MULTILINE))
        assert {"demo", "test"} <= named <= targets

    def test_the_readmes_configuration_is_valid(self, tmp_path):
        (snippet,) = re.findall(r"```yaml\n(.+?)```", README, re.DOTALL)
        path = tmp_path / "kvbus.yaml"
        path.write_text(snippet)
        done = CliRunner().invoke(main, ["check", str(path)])
        assert done.exit_code == 0, done.output

    def test_the_readmes_one_line_command_is_valid(self):
        (source, output) = re.findall(r"`kvbus run --source (\S+) --output '(\S+)'`", README)[0]
        done = CliRunner().invoke(main, ["check", "--source", source, "--output", output])
        assert done.exit_code == 0, done.output

    def test_the_readme_has_the_results_of_the_interop_page(self):
        assert measured.rendered(README) == README, "python -m tests.docs.measured"
        table = measured.short_table(measured.INTEROP.read_text())
        assert table.count("\n| ") == 7, "a router is missing"

    def test_the_benchmark_tables_agree_with_their_results(self):
        """`python -m bench --check` also checks the table of README.md.

        The test runs it as a process, because tests do not import benchmarks.
        """
        command = [sys.executable, "-m", "bench", "--check"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_the_readmes_verdict_has_the_layout_of_the_demo(self):
        """The numbers of the demo's verdict in README.md are from one real run.

        The test draws the verdict again from these numbers, with the demo's present layout and words.
        """
        (shown,) = re.findall(r"(╭─  verdict: .+?╯\n)", README, re.DOTALL)
        found = re.findall(r"│ (router-\w|no kvbus) +([\d,]+) +([\d,]+) +([\d,]+) +[✓✗] +│", shown)
        rows = tuple(Row(name, name == "no kvbus", *map(number, counts)) for name, *counts in found)
        assert len(rows) == 3
        (engines,) = {row.blocks for row in rows if not row.direct}
        direct = rows[-1]
        assert (direct.blocks or 0) - direct.dead + direct.missing == engines
        drawn = io.StringIO()
        exact = not any(row.wrong for row in rows if not row.direct)
        Console(file=drawn, width=84, color_system=None).print(render_verdict(rows, engines, exact, UNICODE))
        assert drawn.getvalue() == shown
