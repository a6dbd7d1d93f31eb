"""``kvbus query``: ask which source holds the longest prefix of a prompt."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

import click

from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.index import named_streams
from kvbus.cli.login import bus_url, login, login_options
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from kvbus.client import Curve
    from kvbus.tools.asking import Login

_OK: Final = 200
_BAD: Final = {400, 413}
"""HTTP statuses with which the index refuses a query that is malformed or too large."""

_IDLE_S: Final = 2.0

_is_ambiguous: Final = re.compile(r"(?:[0-9]{2}){1,10}").fullmatch
"""Match a hash that consists of decimal digits, and may be an integer or a byte string in hexadecimal."""
_is_short_number: Final = re.compile(r"[0-9]{1,20}").fullmatch


@click.command("query", short_help="Ask which source holds the longest prefix of a prompt.")
@click.argument("sources", nargs=-1, metavar="[SOURCE]…")
@click.option("--http", default="127.0.0.1:9478", show_default=True, metavar="URL", help="Address of the index.")
@login_options
@click.option(
    "--tokens", type=click.File(), metavar="FILE", help="File with the prompt's token ids; - for standard input."
)
@click.option("--hashes", metavar="HASH,…", help="The hashes of the prompt's blocks, from the first block to the last.")
@click.option("--lora", metavar="NAME", help="LoRA adapter of the prompt.")
@click.option("--salt", metavar="TEXT", help="Cache salt of the prompt.")
@click.option(
    "--output",
    "output",
    metavar="NAME",
    help="If SOURCE is a bus: the output to read.  [default: the first that can be read]",
)
@click.option(
    "--copies",
    is_flag=True,
    help="Drop a block only after as many removals as stores. Use this if SOURCE is an engine, not a kvbus.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Maximum seconds to wait for the index or, with a SOURCE, for its replay.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@curve_options
def command(
    *,
    sources: tuple[str, ...],
    http: str,
    http_token_file: Path | None,
    http_ca: Path | None,
    tokens: TextIO | None,
    hashes: str | None,
    lora: str | None,
    salt: str | None,
    output: str | None,
    copies: bool,
    timeout: float,
    as_json: bool,
    curve_secret_key: Path | None,
    curve_server_key: Path | None,
) -> None:
    """Ask which sources hold the longest prefix of a prompt, the best first.

    \b
    Examples:
      kvbus query --tokens prompt.json
      kvbus query --hashes 6280583736533942967,-4611686018427387904
      curl -s localhost:8000/tokenize -d '{"prompt": "Hello"}' | kvbus query --tokens -
      kvbus query --http https://index:9478 --http-token-file router-a.token --tokens prompt.json
      kvbus query http://127.0.0.1:9477 --tokens prompt.json
      kvbus query tcp://10.0.0.7:5657,tcp://10.0.0.7:5658 --tokens prompt.txt --json

    kvbus query asks a running `kvbus index`. With a SOURCE it needs no index, but reads the replay of the SOURCE once.
    A SOURCE has the same forms as for `kvbus index`. FILE is a JSON list, a JSON object with a list under "tokens", or
    integers with commas or blanks between them. The hashes are either all integers (decimal or 0x…) or all byte strings
    in hexadecimal. Hashes that can be either are looked up as both.

    Exit codes: 0 answered, 2 a malformed question, 69 no answer, 78 a source cannot be read.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if (tokens is None) == (hashes is None):
        raise click.UsageError("give either --tokens FILE or --hashes HASH,…")
    question: dict[str, Any] = {"lora": lora, "salt": salt}
    if tokens is not None:
        try:
            question["tokens"] = token_ids(tokens.read())
        except UnicodeDecodeError as error:
            raise click.UsageError(f"--tokens: {tokens.name} is not a text file") from error
    elif hashes is not None:
        question["hashes"] = [each.strip() for each in hashes.split(",")]
        if all(map(_is_ambiguous, question["hashes"])):
            say("note: each hash is looked up as an integer and as hexadecimal bytes; write 0x… for an integer")
    curve = curve_keys(curve_secret_key, curve_server_key)
    url = bus_url(http)
    shown = login(url, http_token_file, http_ca)
    answer: dict[str, Any] | None = None

    async def session(stop: asyncio.Event) -> None:
        async def work() -> None:
            nonlocal answer
            if sources:
                answer = await rebuild(sources, question, shown, output, timeout, copies=copies, curve=curve)
            else:
                answer = await ask(url, question, timeout, shown)

        await until(stop, work())

    run_until_signal(session)
    if answer is None:
        say("interrupted")
        raise SystemExit(ExitCode.INTERRUPTED)
    if as_json:
        click.echo(json.dumps(answer))
        return
    matches = answer["results"][0]["matches"]
    for match in matches:
        tiers = ", ".join(f"{medium} {count}" for medium, count in match["tiers"].items())
        click.echo(f"{match['source']}  {match['blocks']} blocks, {match['tokens']} tokens: {tiers}{_unsure(match)}")
    if not matches:
        say("no source holds a block of the prompt")
    for source in answer["incomplete"]:
        state = "partial" if source["partial"] else source["state"]
        say(f"note: {source['source']} is {state}; it may hold more blocks than are known")


def _unsure(source: dict[str, Any]) -> str:
    return " (partial)" if source["partial"] else "" if source["state"] == "live" else f" ({source['state']})"


def token_ids(text: str) -> list[int]:
    """Return the token ids that a file's text lists.

    Raises:
        click.UsageError: the text is not a list of token ids.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith(("[", "{")) != text.rstrip().endswith(("]", "}")):
            raise click.UsageError("--tokens: a bracket is missing at one end: is the file cut off?") from None
        found = re.split(r"[\s,]+", text.strip(" \n[],"))
        found = [int(each) if _is_short_number(each) else each for each in found]
    if isinstance(found, dict):
        if "tokens" not in found:
            raise click.UsageError('--tokens: the object has no "tokens"')
        found = found["tokens"]
    elif type(found) is int:
        found = [found]
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        odd = next((each for each in found if type(each) is not int), "nothing") if isinstance(found, list) else found
        raise click.UsageError(f"--tokens: {odd!r:.100} is not a token id; for example [128000, 9906, 1917]")
    if not found:
        raise click.UsageError("--tokens: the list is empty; for example [128000, 9906, 1917]")
    return found


async def ask(url: str, question: dict[str, Any], timeout: float, shown: Login) -> dict[str, Any]:  # noqa: ASYNC109 - the user's
    """Send a query to a running `kvbus index`, and return its answer.

    Raises:
        NoAnswerError: no answer comes within ``timeout`` seconds, or the index rejects the request.
        click.UsageError: the query is malformed.
    """
    from kvbus.tools.asking import NoAnswerError, asking  # noqa: PLC0415 - imported on use, to keep `kvbus --help` fast

    try:
        async with asking(url, timeout), shown.session() as session:
            async with session.post(f"{url}/query", json=question, allow_redirects=False) as response:
                status, answer = response.status, await response.json(content_type=None)
            if status == _OK:
                return dict(answer)
            text = str(answer["error"])
    except NoAnswerError as error:
        if error.listens:
            raise
        why = str(error).removeprefix("no bus answers")
        raise NoAnswerError(f"no index answers{why}: start `kvbus index`, or name a SOURCE") from error
    if status in _BAD:
        raise click.UsageError(text)
    raise NoAnswerError(text)


async def rebuild(
    sources: tuple[str, ...],
    question: dict[str, Any],
    shown: Login,
    output: str | None,
    timeout: float,  # noqa: ASYNC109 - of the subscribers
    *,
    copies: bool,
    curve: Curve | None,
) -> dict[str, Any]:
    """Answer a query without a running index: read the replay of each source once, and use the blocks in the replays.

    Raises:
        NoAnswerError: a source does not answer within ``timeout`` seconds.
        UnusableError: a source has no replay, or no token ids.
        click.UsageError: a source or the query is malformed.
    """
    import msgspec  # noqa: PLC0415 - imported on use, to keep `kvbus --help` fast

    from kvbus.client import Timing  # noqa: PLC0415
    from kvbus.index.bus import Bus, UnusableError  # noqa: PLC0415
    from kvbus.index.follower import Follower  # noqa: PLC0415
    from kvbus.index.questions import RefusedError, read  # noqa: PLC0415
    from kvbus.tools.asking import NoAnswerError  # noqa: PLC0415

    urls = [bus_url(each) for each in sources if each.startswith(("http://", "https://"))]
    streams = named_streams([each for each in sources if not each.startswith(("http://", "https://"))])
    idle = min(timeout, _IDLE_S)
    timing = Timing(idle_s=idle, attempts=math.ceil(timeout / idle))
    buses = [Bus(url, shown, output, curve=curve is not None) for url in urls]
    try:
        follower = Follower(streams, buses, copies=copies, curve=curve, timing=timing, once=True)
        await follower.open()
    except ValueError as error:
        raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557,tcp://127.0.0.1:5558") from error
    try:
        await follower.complete()
        silent = [*follower.silent, *(bus.url for bus in buses if not bus.answers)]
        if silent:
            raise NoAnswerError(f"no answer from {', '.join(silent)} within {timeout:g} s")
        answer = follower.answer(read(json.dumps(question).encode()))
    except (RefusedError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    finally:
        await follower.close()
    tokenless = [each.source for each in answer.incomplete if each.state == "no_tokens"]
    if tokenless:
        raise UnusableError(
            f"{', '.join(tokenless)} has no token ids (token_ids: drop), so prompts cannot be found by their tokens"
        )
    built: dict[str, Any] = msgspec.to_builtins(answer)
    return built
