"""The requests of simulated engines: a synthetic load from a seed, or a trace of recorded requests.

Both are lazy iterators of `Job`. The synthetic load never ends. With the same seed, equal prefixes have equal tokens on
all ranks and engines.
"""

from __future__ import annotations

import functools
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from kvbus.common.errors import ExitCode, KvbusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACE_BLOCK: Final = 512
"""Number of prompt tokens that one entry of `hash_ids` in a trace stands for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to a simulated engine.

    Attributes:
        tokens: the prompt's tokens, followed by the tokens that the engine generates.
        prompt: number of prompt tokens.
        tenant: LoRA adapter or cache salt; "" for none.
    """

    tokens: tuple[int, ...]
    prompt: int
    tenant: str = ""


class TraceError(KvbusError):
    """A trace file cannot be used. The error names the file and the line."""

    exit_code = ExitCode.CONFIG


class _TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """Return random token ids below 65,536.

    Each id is two random bytes, which is fast. Nearly all real vocabularies have at least as many tokens.
    """
    return struct.unpack(f"<{count}H", rng.randbytes(2 * count))


def synthetic(
    seed: int,
    rank: int = 0,
    *,
    system_prompts: int = 4,
    system_tokens: int = 256,
    conversations: int = 32,
    turns: int = 6,
    turn_tokens: int = 192,
    output_tokens: int = 192,
    max_tokens: int = 4096,
    tenants: int = 0,
) -> Iterator[Job]:
    """Yield an endless load of conversations with several turns. The conversations share system prompts.

    Args:
        seed: seed of the load. All ranks with the same seed have the same system prompts.
        rank: data-parallel rank. Each rank has its own conversations.
        system_prompts: number of system prompts. The first prompts are used most often.
        system_tokens: number of tokens of the longest system prompt.
        conversations: number of simultaneous conversations.
        turns: maximum number of turns of one conversation.
        turn_tokens: maximum number of tokens that the user adds in a turn.
        output_tokens: maximum number of tokens of an answer.
        max_tokens: number of tokens at which a conversation ends.
        tenants: number of LoRA adapters or cache salts; 0 for none. About half of the conversations use one.
    """
    shared = random.Random(f"kvbus/system/{seed}")
    systems = [_tokens(shared, shared.randint(system_tokens // 2, system_tokens)) for _ in range(system_prompts)]
    popularity = [1 / (n + 1) for n in range(system_prompts)]
    rng = random.Random(f"kvbus/load/{seed}/{rank}")
    alive: list[tuple[tuple[int, ...], int, str]] = []
    while True:
        if len(alive) < conversations:
            tenant = f"adapter-{rng.randint(1, tenants)}" if tenants and rng.random() < 0.5 else ""
            history = rng.choices(systems, popularity)[0] if systems else ()
            left = rng.randint(1, turns)
        else:
            history, left, tenant = alive.pop(rng.randrange(len(alive)))
        prompt = history + _tokens(rng, rng.randint(1, turn_tokens))
        tokens = prompt + _tokens(rng, rng.randint(1, output_tokens))
        yield Job(tokens, len(prompt), tenant)
        if left > 1 and len(tokens) < max_tokens:
            alive.append((tokens, left - 1, tenant))


@functools.lru_cache(maxsize=8192)
def expand(hash_id: int) -> tuple[int, ...]:
    """Return the 512 token ids that an entry of a trace's `hash_ids` stands for. Equal entries have the same tokens."""
    return _tokens(random.Random(f"kvbus/trace/{hash_id}"), TRACE_BLOCK)


def read_trace(path: Path, *, rank: int = 0, ranks: int = 1) -> Iterator[Job]:
    """Yield the requests of one rank from a trace file: every `ranks`-th request, beginning with number `rank`.

    The file has JSON lines as in Mooncake's FAST'25 traces. The fields are ``timestamp`` (in ms; not used, because the
    publisher has a fixed rate), ``input_length`` and ``output_length`` in tokens, and ``hash_ids`` with one id for each
    512 tokens of the prompt.

    Raises:
        TraceError: the file cannot be read, or a line is not such an object.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if (number - 1) % ranks != rank or not line.strip():
                    continue
                try:
                    request = decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise TraceError(f"{path}:{number}: not a trace request: {error}") from error
                prompt = [token for hash_id in request.hash_ids for token in expand(hash_id)]
                if not 0 < request.input_length <= len(prompt):
                    known = f"{len(prompt)}, the number of tokens of its hash_ids"
                    raise TraceError(f"{path}:{number}: input_length {request.input_length} is not from 1 to {known}")
                del prompt[request.input_length :]
                output = _tokens(random.Random(f"kvbus/output/{number}"), request.output_length)
                yield Job((*prompt, *output), len(prompt))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
