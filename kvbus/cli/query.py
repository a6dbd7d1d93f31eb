"""``kvbus query``: ask a running bus which source holds the longest prefix of a prompt."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, Final

import click

from kvbus.cli.login import bus_url, login, login_options
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from kvbus.tools.asking import Login

_OK: Final = 200
_BAD: Final = 400
_BUILDING: Final = 503


@click.command("query")
@click.option("--http", default="127.0.0.1:9477", show_default=True, metavar="URL", help="The bus's HTTP port.")
@login_options
@click.option("--tokens", type=click.File(), metavar="FILE", help="The prompt's token ids; - is standard input.")
@click.option("--hashes", metavar="HASH,…", help="The hashes of the prompt's blocks, first to last.")
@click.option("--lora", metavar="NAME", help="The adapter.")
@click.option("--salt", metavar="TEXT", help="The cache salt.")
@click.option("--analytics", is_flag=True, help="How long blocks live, how many come and go; with analytics: true.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, metavar="S")
@click.option("--json", "as_json", is_flag=True, help="Print the bus's answer.")
def command(
    *,
    http: str,
    http_token_file: Path | None,
    http_ca: Path | None,
    tokens: TextIO | None,
    hashes: str | None,
    lora: str | None,
    salt: str | None,
    analytics: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Ask which sources hold the longest prefix of a prompt, the best first.

    \b
    Examples:
      kvbus query --tokens prompt.json
      kvbus query --hashes 6280583736533942967,-4611686018427387904
      curl -s localhost:8000/tokenize -d '{"prompt": "Hello"}' | kvbus query --tokens -
      kvbus query --http https://bus:9477 --http-token-file router-a.token --tokens prompt.json
      kvbus query --tokens prompt.txt --lora adapter-1 --json | jq '.results[0].matches[0].source'
      kvbus query --analytics

    FILE is a JSON list, a JSON object with one under "tokens", or integers with commas or blanks between them. Only
    programs on the bus's own host may ask (through `kubectl port-forward` everybody is there), and who has a token.

    Exit codes: 0 answered, 2 a bad question, 69 no answer.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    asked = tokens is not None or hashes is not None
    if (asked and tokens is not None and hashes is not None) or not (asked or analytics):
        raise click.UsageError("give either --tokens FILE or --hashes HASH,…, or --analytics")
    if not asked and (lora, salt) != (None, None):
        raise click.UsageError("--lora and --salt are for --tokens")
    question: dict[str, Any] = {"analytics": True} if analytics else {}
    if asked:
        question |= {"lora": lora, "salt": salt}
    if tokens is not None:
        question["tokens"] = token_ids(tokens.read())
    elif hashes is not None:
        question["hashes"] = [each.strip() for each in hashes.split(",")]
    answer: dict[str, Any] | None = None

    url = bus_url(http)
    shown = login(url, http_token_file, http_ca)

    async def session(stop: asyncio.Event) -> None:
        async def work() -> None:
            nonlocal answer
            answer = await ask(url, question, timeout, shown)

        await until(stop, work())

    run_until_signal(session)
    if answer is None:
        say("interrupted")
        raise SystemExit(ExitCode.INTERRUPTED)
    if as_json:
        click.echo(json.dumps(answer))
        return
    for source in answer.get("analytics", ()):
        click.echo(f"{source['source']}  {_said(source['blocks'])}{_unsure(source)}")
    for match in answer["results"][0]["matches"] if asked else ():
        tiers = ", ".join(f"{medium} {count}" for medium, count in match["tiers"].items())
        click.echo(f"{match['source']}  {match['blocks']} blocks, {match['tokens']} tokens: {tiers}{_unsure(match)}")
    if asked and not answer["results"][0]["matches"]:
        say("no source holds anything of it")
    for source in answer["incomplete"]:
        state = "partial" if source["partial"] else source["state"]
        say(f"note: {source['source']} is {state}; it may hold more than is known")


def _unsure(source: dict[str, Any]) -> str:
    return " (partial)" if source["partial"] else "" if source["state"] == "live" else f" ({source['state']})"


def _said(blocks: dict[str, Any]) -> str:
    """The analytics of a source, in a line."""
    again = blocks["stored_again"] / max(blocks["stored"], 1)
    rates = f"{blocks['stored_per_second']:.3g} stored and {blocks['removed_per_second']:.3g} removed a second"
    return (
        f"{blocks['live']:,} live blocks, {blocks['shared']:.0%} of them elsewhere too; {rates}; "
        f"{again:.0%} of {blocks['stored']:,} stored again; {lifetime(blocks['lifetimes']['buckets'])}"
    )


def lifetime(buckets: dict[str, int]) -> str:
    """How long half of the blocks have lived."""
    whole, seen, last = sum(buckets.values()), 0, "0"
    for bound, count in buckets.items():
        seen += count
        if count and 2 * seen >= whole:
            return f"half live up to {bound} s" if bound != "+Inf" else f"half live longer than {last} s"
        last = bound
    return "none has gone that was seen to come"


def token_ids(text: str) -> list[int]:
    """The token ids of a file.

    Raises:
        click.UsageError: there is something else in it.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = re.split(r"[\s,]+", text.strip(" \n[],"))
        found = [int(each) if each.isascii() and each.isdecimal() else each for each in found]
    if isinstance(found, dict):
        found = found.get("tokens")
    elif type(found) is int:
        found = [found]
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        odd = next((each for each in found if type(each) is not int), "nothing") if isinstance(found, list) else found
        raise click.UsageError(f"--tokens: {odd!r} is no token id; for example [128000, 9906, 1917]")
    return found


async def ask(url: str, question: dict[str, Any], timeout: float, shown: Login) -> dict[str, Any]:  # noqa: ASYNC109 - the user's
    """Ask a bus, again while it builds what it answers from.

    Raises:
        NoAnswerError: nobody answers within ``timeout`` seconds, or the bus refuses.
        click.UsageError: the question is malformed.
    """
    from kvbus.tools.asking import NoAnswerError, asking  # noqa: PLC0415 - imported on use, to keep `kvbus --help` fast

    async with asking(url, timeout), shown.session() as session:
        while True:
            async with session.post(f"{url}/query", json=question, allow_redirects=False) as response:
                status, answer = response.status, await response.json(content_type=None)
            if status == _OK:
                return dict(answer)
            if status != _BUILDING:
                break
            await asyncio.sleep(0.2)
        text = str(answer["error"])
    if status == _BAD:
        raise click.UsageError(text)
    raise NoAnswerError(text)
