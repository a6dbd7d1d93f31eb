"""The rows of the catalogue of findings about engines: connections, ranks, replays, messages and missing data."""

from __future__ import annotations

from typing import Final

from kvbus.core.findings.finding import note, problem

# -- no connection to an engine, and other endpoints at which no connection opens

HOST_UNKNOWN: Final = problem(
    "host_unknown",
    "{at}.{name}",
    "the host name of {endpoint} does not resolve{detail}",
    "correct the host name, or the name server",
)
NOTHING_LISTENS: Final = problem(
    "nothing_listens",
    "{at}.{name}",
    "nothing listens at {endpoint}{detail}",
    "start the engine with its KV-cache events on, or correct host and port",
    "The endpoint's machine answers, but no process listens at the endpoint's port.",
)
NO_ROUTE: Final = problem(
    "no_route",
    "{at}.{name}",
    "the network has no route to {endpoint}{detail}",
    "correct the address, or the routes of this machine's network",
    "This machine's network has no route to the address, or a firewall rule forbids the connection.",
)
NO_ANSWER: Final = problem(
    "no_answer",
    "{at}.{name}",
    "nothing answers at {endpoint}: a firewall drops the packets, or the machine is down{detail}",
    "open the firewall or NetworkPolicy for this port, or correct the address",
)
OTHER_ADDRESS: Final = problem(
    "other_address",
    "{at}.{name}",
    "nothing listens at the first address of {endpoint}'s host name, and ZeroMQ tries no other address{detail}",
    "write the right address in place of the host name",
)
SILENT_PORT: Final = problem(
    "silent_port",
    "{at}.{name}",
    "{endpoint} accepts connections and sends nothing: it is not a ZeroMQ socket, or its process hangs{detail}",
    "correct the port; if the port is right, find out why the engine's process hangs",
)
NOT_ZEROMQ: Final = problem(
    "not_zeromq",
    "{at}.{name}",
    "{endpoint} does not speak ZeroMQ{detail}",
    "correct the port: the engine's HTTP port is not its event port",
)
ZMTP_TOO_OLD: Final = problem(
    "zmtp_too_old",
    "{at}.{name}",
    "{endpoint} speaks ZMTP 1.0 or 2.0, which is too old{detail}",
    "update the libzmq of the program at this address to version 3 or newer",
)
CURVE_ONE_SIDE: Final = problem(
    "curve_one_side",
    "{at}.curve_secret_key_file",
    "only one side of the connection to {endpoint} uses CURVE{detail}",
    "set the CURVE keys on both sides or on neither",
)
CURVE_KEYS_DIFFER: Final = problem(
    "curve_keys_differ",
    "{at}.curve_server_key_file",
    "the CURVE keys of kvbus and {endpoint} do not match{detail}",
    "put the public key of the program at this address into curve_server_key_file, and kvbus's public key into that "
    "program's list of allowed keys",
)
CURVE_NOT_INSTALLED: Final = note(
    "curve_not_installed",
    "{at}.{name}",
    "the CURVE keys of {endpoint} cannot be tested: kvbus[curve] is not installed{detail}",
    "pip install 'kvbus[curve]'",
    "On a machine without kvbus[curve], doctor cannot test the keys. The running bus may have no problem.",
)
HANDSHAKE_CLOSED: Final = problem(
    "handshake_closed",
    "{at}.{name}",
    "{endpoint} ends the connection in the ZeroMQ handshake{detail}",
    "correct the port; if it is the port of the engine's events, look in the engine's log why it ends the connection",
)
ENDPOINT_IS_SUBSCRIBER: Final = problem(
    "endpoint_is_subscriber",
    "{at}.endpoint",
    "{endpoint} is a subscriber ({type}) socket; expected a publisher (PUB)",
    "this port belongs to a router or to kvbus; set endpoint to the engine's event port",
)
ENDPOINT_IS_REPLAY: Final = problem(
    "endpoint_is_replay",
    "{at}.endpoint",
    "{endpoint} is a replay (ROUTER) socket; expected a publisher (PUB)",
    "set endpoint to the engine's event port",
)
ENDPOINT_IS_OTHER: Final = problem(
    "endpoint_is_other",
    "{at}.endpoint",
    "{endpoint} is a {type} socket; expected a publisher (PUB)",
    "set endpoint to the engine's event port",
)
SWAPPED_PORTS: Final = problem(
    "swapped_ports",
    "{at}.endpoint",
    "endpoint and replay_endpoint are swapped: {endpoint} answers replays and {replay} publishes",
    "exchange the values of endpoint and replay_endpoint",
)
BOTH_DIAL: Final = problem(
    "both_dial",
    "{at}.bind",
    "the engine runs (its replay answers), but nothing listens at {endpoint}: the engine and kvbus both dial, or the "
    "engine publishes at another port",
    'set bind: true, or give the engine "endpoint": "tcp://*:{port}", or correct the port',
    "Either the engine or kvbus has to bind the port, and the other one has to connect to it.",
)
BOTH_BIND: Final = problem(
    "both_bind",
    "{at}.bind",
    "a publisher already listens at {endpoint}: the engine and kvbus both bind",
    "set bind: false, or write a host in place of the wildcard in the engine's own endpoint",
    "Either the engine or kvbus has to bind the port, and the other one has to connect to it.",
)
NO_ENGINE_DIALLED_IN: Final = problem(
    "no_engine_dialled_in",
    "{at}.bind",
    "no engine has dialled in at {endpoint}",
    "give the engine this endpoint with a concrete host; if the engine binds (tcp://*), set bind: false",
)
ENGINE_PORT_TAKEN: Final = problem(
    "engine_port_taken",
    "{at}.bind",
    "{endpoint} is in use{detail}",
    "choose another port; if the engine binds this one, set bind: false",
    "kvbus has to listen at this port (bind: true), but another ZeroMQ socket already does.",
)
CANNOT_LISTEN: Final = problem(
    "cannot_listen",
    "{at}.{name}",
    "kvbus cannot listen on {endpoint}: {why}",
    'choose a free port, and an address of this machine or "*"',
)
NO_PUBLISHER_DIALLED_IN: Final = problem(
    "no_publisher_dialled_in",
    "{at}.endpoint",
    "a {type} socket has dialled in at {endpoint}; expected a publisher (PUB)",
    "correct the endpoint in the configuration of the process that dials",
    "A process that is not an engine has connected to the port where kvbus waits for the engine.",
)

# -- ranks

RANKS_MISSING: Final = problem(
    "ranks_missing",
    "{at}.data_parallel_size",
    "nothing listens at {endpoint} (data-parallel rank {ranks}), but {there} of {size} ranks answer",
    "set data_parallel_size to {there} if the engine has no more ranks, or start the missing ranks",
)
MORE_RANKS_PERHAPS: Final = note(
    "more_ranks_perhaps",
    "{at}.data_parallel_size",
    "a publisher answers at {endpoint}, one port above the last rank's, and no source reads it",
    "if the publisher is a rank of this engine, raise data_parallel_size above {rank}",
)
RANK_SHIFTED: Final = problem(
    "rank_shifted",
    "{at}.endpoint",
    "rank {theirs} publishes at {endpoint}, the port of rank {ours}",
    "set endpoint to the port of rank 0; rank r publishes at that port plus r",
    "Routers assign blocks to the wrong rank.",
)
RANK_OUT_OF_RANGE: Final = problem(
    "rank_out_of_range",
    "{at}.data_parallel_size",
    "a batch names rank {rank}, but data_parallel_size is {size} (ranks begin at 0)",
    "set data_parallel_size to the engine's number of ranks",
)

# -- the replay and the snapshots of an engine

REPLAY_NOT_ROUTER: Final = problem(
    "replay_not_router",
    "{at}.replay_endpoint",
    "{endpoint} {what} and does not answer replay requests",
    "set replay_endpoint to the engine's replay port",
    "From this replay_endpoint, kvbus cannot recover batches that were lost on the way from the engine.",
)
REPLAY_SILENT: Final = problem(
    "replay_silent",
    "{at}.replay_endpoint",
    "the replay at {endpoint} does not answer",
    "set replay_endpoint to the replay port of this engine and rank; if it is already this port, the engine's process "
    "hangs",
    "Until the engine's replay answers, kvbus cannot recover lost batches.",
)
REPLAY_OF_ANOTHER: Final = problem(
    "replay_of_another",
    "{at}.replay_endpoint",
    "the replay at {replay} returns batches that differ from those that {endpoint} publishes",
    "set replay_endpoint to the replay port of the same engine and rank, and put no Service or proxy in front of "
    "several engines",
    "kvbus uses no answer of this replay_endpoint. It forgets the blocks of earlier answers, and cannot recover lost "
    "batches. It continues to ask, and uses the answers again after they have agreed with the live stream.",
)
REPLAY_EMPTY: Final = problem(
    "replay_empty",
    "{at}.replay_endpoint",
    "the replay at {replay} has none of the batches that {endpoint} publishes",
    "set replay_endpoint to the replay port of the same engine and rank, and set buffer_steps at the engine",
    "From this replay_endpoint, kvbus cannot recover batches that were lost on the way from the engine.",
)
REPLAY_ALONE: Final = problem(
    "replay_alone",
    "{at}.endpoint",
    "no batch arrives on the live connection; all come late, in answers to replay requests",
    "set endpoint to the event port of the engine that replay_endpoint belongs to",
    "Routers learn of new and removed blocks seconds late.",
)
REPLAY_TOO_LONG: Final = problem(
    "replay_too_long",
    "outputs[].replay_endpoint",
    "a router of output {outputs} may lack blocks: it requested a replay from 0, and kvbus's answer began later, which "
    "llm-d refuses; an answer from 0 would need more than {limit:,} empty batches; llm-d needs no such answer if its "
    "live connection comes from the same address with the same key, and the output reads no log",
    "let llm-d connect to endpoint and replay_endpoint from one address, with on_subscribe: state; or remove "
    "replaySocketPort from its configuration, so that it requests no replays",
)
REQUEST_WAITS: Final = note(
    "request_waits",
    "{at}.replay_endpoint",
    "a request to the engine waits in kvbus, because kvbus has no free file descriptor",
    "nothing needs to be done: kvbus sends the request as soon as a descriptor is free; with a higher limit "
    "(ulimit -n) kvbus sends more requests at a time",
    "While the request waits in kvbus, no batch of the engine counts as lost.",
)

# -- messages of an engine

CONFLICT: Final = problem(
    "conflict",
    "{at}.endpoint",
    "several publishers send on one endpoint, {endpoint}: kvbus accepts no batch until only one publisher is left",
    "give each engine and each rank its own source and address, and put no Service or proxy in front of several "
    "engines",
    "Messages do not name their publisher, so kvbus cannot separate the batches of two publishers. kvbus has cleared "
    "the source's blocks at routers.",
)
TOPIC: Final = problem(
    "topic",
    "{at}.topic",
    "no live batch comes under topic {prefix}: the engine publishes under {elsewhere}",
    "set topic to the engine's topic, or leave topic empty",
    "kvbus accepts no live batch of this engine. If the engine answers replay requests, kvbus gets the batches late.",
)
OTHER_TOPIC: Final = problem(
    "other_topic",
    "{at}.topic",
    "the engine publishes several streams: kvbus reads topic {own} and refuses batches under {second}",
    "configure a source for each topic of this endpoint, with the topic's complete name as topic",
    "Routers do not learn of the blocks that the engine announces under the refused topic.",
)
TOPIC_UNKNOWN: Final = problem(
    "topic_unknown",
    "{at}.topic",
    "the engine publishes several topics, and its replay answers name no topic: kvbus cannot use the answers",
    "configure a source for each topic of this endpoint, with the topic's complete name as topic",
    "kvbus cannot recover batches that were lost on the way from the engine, and counts them as lost.",
)
NOT_EVENTS: Final = problem(
    "not_events",
    "{at}.endpoint",
    "events or batches refused ({count:,}): {why}",
    "set endpoint to an engine's event port; to inspect the stream, save it with kvbus record",
)
UNKNOWN_EVENTS: Final = note(
    "unknown_events",
    "{at}.endpoint",
    "events left out ({count:,}), because this version of kvbus does not know their types: {types}",
    "upgrade kvbus to a version that knows these types; if the engine sends no other events, set endpoint to an "
    "engine's event port",
    "Routers do not get these events. If such an event changes the engine's cache, routers do not learn of the change.",
)
EVENTS_REFUSED: Final = problem(
    "events_refused",
    "{at}.endpoint",
    "events refused ({count:,}): {why}",
    "look up the reason for the refusal in docs/PROTOCOL.md; to report a defect, save the stream with kvbus record",
    "Routers do not learn of the changes to the engine's cache that the refused events announce.",
)
FRAME_TOO_LARGE: Final = problem(
    "frame_too_large",
    "limits.max_frame_bytes",
    "a frame of {endpoint} is larger than limits.max_frame_bytes",
    "raise limits.max_frame_bytes, if the engine needs frames of this size",
    "kvbus closes the connection when such a large frame arrives, and the batch is lost.",
)
MESSAGE_TOO_LARGE: Final = problem(
    "message_too_large",
    "{at}.endpoint",
    "a message of {endpoint} does not end: it is larger than four times limits.max_frame_bytes, or has more than 1,024 "
    "frames",
    "set endpoint to an engine's event port; if it is one, report the defect of the engine's publisher",
    "kvbus closes the connection when a message exceeds one of these limits, and the message is lost. A batch has "
    "three frames.",
)
ZMTP_BROKEN: Final = problem(
    "zmtp_broken",
    "{at}.endpoint",
    "the publisher at {endpoint} breaks the rules of ZMTP, ZeroMQ's protocol",
    "update the engine's ZeroMQ library; the log of kvbus names the broken rule",
    "kvbus closes the connection when a peer breaks a rule of the protocol, and connects again. Batches sent meanwhile "
    "are lost, or come by a replay.",
)
BATCH_TOO_LARGE: Final = problem(
    "batch_too_large",
    "limits.max_events",
    "batches of {endpoint} hold more events than limits.max_events",
    "raise limits.max_events, if the engine needs batches of this size",
    "kvbus refuses a batch with too many events, and applies none of them.",
)
BLOCK_SIZE: Final = problem(
    "block_size",
    "block_size",
    "events refused ({count:,}): block_size is {size}, but the engine has blocks{own}",
    "set block_size to the engine's block size, or to auto",
    "Routers do not learn of the blocks in refused events.",
)
BLOCK_SIZE_TOO_LARGE: Final = problem(
    "block_size_too_large",
    "block_size",
    "no block is announced to routers: block_size is {size}, and the engine's blocks are smaller",
    "set block_size to the engine's block size, or to auto",
)
NO_PREFIX: Final = problem(
    "no_prefix",
    "groups",
    "no group of this model has blocks that form prefixes (its groups are sliding window, chunked local or mamba): "
    "routers get no block",
    "set groups: all, if the routers can use blocks that form no prefixes",
    "With groups: prefix, the default, kvbus announces only blocks of groups whose blocks form prefixes.",
)
REANNOUNCED: Final = problem(
    "reannounced",
    "duplicates",
    "{stores:,} stores announced prefixes that the cache already held, and kvbus counts {copies:,} copies of one block",
    "set duplicates: ignore, if the engine's requests set kv_cache_report_mode=full",
    "The engine may announce each prefix again with each request. kvbus counts each announcement as a copy and waits "
    "for as many removals, so routers keep blocks that the engine has evicted.",
)
NO_STORES: Final = problem(
    "no_stores",
    "{at}.endpoint",
    "no batch of {endpoint}, live or replayed, announces a stored block",
    "switch on prefix caching in the engine",
    "Routers get no block of this engine.",
)
NO_EVENTS: Final = problem(
    "no_events",
    "{at}.endpoint",
    "the engine at {endpoint} has published nothing so far: its replay is empty",
    "switch on prefix caching and KV-cache events in the engine, then send it a new, long prompt",
    "Routers get no block of this engine.",
)
ENGINE_IDLE: Final = note(
    "engine_idle",
    "{at}.endpoint",
    "nothing has come from {endpoint} so far: the engine is idle, or publishes no events",
    "send the engine a new, long prompt; or run doctor with --history, to read the batches published earlier",
    "An engine that serves no requests publishes nothing, so this may be normal.",
)
CLOCK_OFF: Final = note(
    "clock_off",
    "{at}.endpoint",
    "the clock of the engine at {endpoint} is {seconds:,.0f} s {which}, or its batches come late",
    "synchronize the clocks of the engine's machine and of this machine (NTP)",
    "kvbus's figures for the age of events are wrong. Routing is not affected.",
)
SEVERAL_ADDRESSES: Final = note(
    "several_addresses",
    "{at}.endpoint",
    "the host name in {endpoint} has {count} addresses, and kvbus reads the engine at only one of them",
    "configure a source for each engine's address, or use discover.dns",
)
HASHES_DIFFER: Final = note(
    "hashes_differ",
    "sources",
    "{one} and {other} have different hashes for the same prompts: PYTHONHASHSEED is unset, or not the same",
    "set PYTHONHASHSEED to one value in all engines, if the router compares block hashes of several workers",
    "The same prompt has different hashes in the engines, so a router that compares hashes finds no common blocks.",
)
API_UNUSABLE: Final = problem(
    "api_unusable",
    "{at}.api",
    "the engine's API at {api} does not say whether the engine sleeps ({why})",
    "correct the source's api; remove this key if the engine is not vLLM",
    "When the engine goes to sleep, it drops its blocks. kvbus does not see this, so routers keep these blocks.",
)
ENGINE_RESTARTED: Final = note(
    "engine_restarted",
    "{at}.endpoint",
    "engine restarted, {blocks:,} blocks cleared, epoch {before} → {epoch}",
    "nothing; if the engine restarts often, read its log",
    "The engine's cache is empty after its restart. kvbus has cleared the engine's blocks at routers.",
)
READ_AGAIN: Final = note(
    "read_again",
    "{at}.endpoint",
    "kvbus reads the engine again from the beginning, {blocks:,} blocks cleared, epoch {before} → {epoch}",
    "nothing; another finding says why, if there is a problem",
    "The engine has not restarted. It had batches that kvbus lacked, or kvbus had read the replay of another engine.",
)

# -- data that a partial source lacks

HISTORY_TRIMMED: Final = problem(
    "history_trimmed",
    "{at}.replay_endpoint",
    "partial: {what} trimmed from the engine's replay buffer before kvbus asked for {them}",
    "the finding ends when {ends}; start kvbus before the engine, or raise the engine's buffer_steps",
)
HISTORY_UNANSWERED: Final = problem(
    "history_unanswered",
    "{at}.replay_endpoint",
    "partial: {what} has not answered a replay request so far",
    "the finding ends when the engine answers a replay request (kvbus repeats it), or when {ends}",
)
BATCHES_LOST: Final = problem(
    "batches_lost",
    "{at}.replay_endpoint",
    "partial: {what} lost and not recoverable{where}",
    "the finding ends when {ends}; to make losses rarer, raise the engine's buffer_steps",
    "The engine holds blocks that routers do not know of.",
)
NO_REPLAY: Final = problem(
    "no_replay",
    "{at}.replay_endpoint",
    "partial: {what} sent while kvbus was not connected, and without a replay_endpoint kvbus cannot request lost "
    "batches",
    "give the engine and the source a replay_endpoint; the finding ends when {ends}",
)
INDEX_FULL: Final = problem(
    "index_full",
    "limits.max_blocks",
    "partial: the index is full: kvbus refuses blocks beyond limits.max_blocks ({blocks:,}), limits.max_index_bytes "
    "({size:,}) or limits.max_groups ({groups:,})",
    "raise the limit that is reached; the finding ends when {ends}",
)
TOO_MANY_OWNERS: Final = problem(
    "too_many_owners",
    "limits.max_owners",
    "partial: the stores of the engine name more than limits.max_owners ({owners:,}) pairs of locality and owner, or a "
    "name of more than 256 characters; kvbus refuses stores with further pairs",
    "raise the limit; the finding ends when {ends}",
)
TOKENLESS: Final = problem(
    "tokenless",
    "{at}.endpoint",
    "partial: the engine announced blocks whose tokens it has never sent. No router gets these blocks",
    "wait: the finding ends when {ends}",
)
STORES_REFUSED: Final = problem(
    "stores_refused",
    "{at}.endpoint",
    "partial: the blocks of refused stores are missing (reason {reasons}, see docs/PROTOCOL.md)",
    "wait: the finding ends when {ends}",
)
HASHES_ALONE: Final = problem(
    "hashes_alone",
    "{at}.endpoint",
    "partial: the engine announces some blocks without tokens (masked blocks of a sliding window, or offloaded "
    "blocks): routers that hash tokens do not get these blocks",
    "wait: the finding ends when {ends}",
)
TIER_UNKNOWN: Final = problem(
    "tier_unknown",
    "{at}.endpoint",
    "partial: the engine named a tier for the first time after a reset of its cache, and kvbus does not know the "
    "blocks that this tier held before",
    "wait: the finding ends when {ends}",
)
