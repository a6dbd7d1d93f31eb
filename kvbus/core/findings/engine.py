"""The catalogue, about engines: connections, ranks, replays, messages, missing data."""

from __future__ import annotations

from typing import Final

from kvbus.core.findings.finding import note, problem

# -- no connection to an engine, and other endpoints at which no connection opens

HOST_UNKNOWN: Final = problem(
    "host_unknown",
    "{at}.{name}",
    "the host name of {endpoint} does not resolve{detail}",
    "correct the host name, or the name server",
    "kvbus cannot look up the address.",
)
NOTHING_LISTENS: Final = problem(
    "nothing_listens",
    "{at}.{name}",
    "nothing listens at {endpoint}{detail}",
    "start the engine with its KV-cache events on, or correct host and port",
    "The machine answers, and no process has this port.",
)
NO_ROUTE: Final = problem(
    "no_route",
    "{at}.{name}",
    "there is no way to {endpoint}{detail}",
    "correct the address, or the route to it",
    "The network has no route to the address, or forbids it.",
)
NO_ANSWER: Final = problem(
    "no_answer",
    "{at}.{name}",
    "nobody answers at {endpoint}: a firewall drops the packets, or the machine is away{detail}",
    "open the firewall or NetworkPolicy for this port, or correct the address",
    "Connection attempts get no answer at all.",
)
OTHER_ADDRESS: Final = problem(
    "other_address",
    "{at}.{name}",
    "nothing listens at the first address of {endpoint}, the only one that ZeroMQ tries{detail}",
    "write that address in place of the name",
    "The host name has several addresses, and ZeroMQ tries only the first one.",
)
SILENT_PORT: Final = problem(
    "silent_port",
    "{at}.{name}",
    "{endpoint} accepts and says nothing: it is no ZeroMQ socket, or its process stands still{detail}",
    "correct the port; if it is the engine's, find out why its process stands still",
    "The connection opens, and the ZeroMQ handshake gets no answer.",
)
NOT_ZEROMQ: Final = problem(
    "not_zeromq",
    "{at}.{name}",
    "{endpoint} does not speak ZeroMQ{detail}",
    "correct the port: the engine's HTTP port is not its event port",
    "Another protocol answers at this port.",
)
ZMTP_TOO_OLD: Final = problem(
    "zmtp_too_old",
    "{at}.{name}",
    "{endpoint} speaks ZMTP 1.0 or 2.0, which is too old{detail}",
    "give the peer libzmq 3 or newer",
    "The peer's ZeroMQ is too old for kvbus.",
)
CURVE_ONE_SIDE: Final = problem(
    "curve_one_side",
    "{at}.curve_secret_key_file",
    "CURVE is on at one side of {endpoint} only{detail}",
    "set the CURVE keys on both sides or on neither",
    "One side encrypts and the other does not, so no connection opens.",
)
CURVE_KEYS_DIFFER: Final = problem(
    "curve_keys_differ",
    "{at}.curve_server_key_file",
    "the CURVE keys do not fit at {endpoint}{detail}",
    "put the peer's public key into curve_server_key_file, and this bus's public key into the peer's list",
    "Both sides encrypt, and one does not accept the other's key.",
)
CURVE_NOT_INSTALLED: Final = note(
    "curve_not_installed",
    "{at}.{name}",
    "CURVE at {endpoint} cannot be looked at: kvbus[curve] is not installed{detail}",
    "pip install 'kvbus[curve]'",
    "doctor cannot try the keys here. The bus itself may be well.",
)
HANDSHAKE_CLOSED: Final = problem(
    "handshake_closed",
    "{at}.{name}",
    "{endpoint} ends the connection in the handshake{detail}",
    "correct the port; if it is the engine's, its log says why",
    "The peer accepts the connection and closes it.",
)
ENDPOINT_IS_SUBSCRIBER: Final = problem(
    "endpoint_is_subscriber",
    "{at}.endpoint",
    "{endpoint} is a subscriber ({type}) socket; expected a publisher (PUB)",
    "this is a router's or kvbus's own port; name the engine's",
    "The configured port belongs to a reader of events.",
)
ENDPOINT_IS_REPLAY: Final = problem(
    "endpoint_is_replay",
    "{at}.endpoint",
    "{endpoint} is a replay (ROUTER) socket; expected a publisher (PUB)",
    "name the engine's event port",
    "The configured port answers replays and publishes nothing.",
)
ENDPOINT_IS_OTHER: Final = problem(
    "endpoint_is_other",
    "{at}.endpoint",
    "{endpoint} is a {type} socket; expected a publisher (PUB)",
    "name the engine's event port",
    "The configured port belongs to another ZeroMQ service.",
)
SWAPPED_PORTS: Final = problem(
    "swapped_ports",
    "{at}.endpoint",
    "endpoint and replay_endpoint are swapped: {endpoint} answers replays and {replay} publishes",
    "exchange the two ports",
    "kvbus subscribes to the replay and asks the publisher: nothing comes.",
)
BOTH_DIAL: Final = problem(
    "both_dial",
    "{at}.bind",
    "the engine is there (its replay answers) and nothing listens at {endpoint}: it dials, and so does kvbus, or it "
    "publishes at another port",
    'set bind: true, or give the engine "endpoint": "tcp://*:{port}", or correct the port',
    "One side has to bind the port. Here both connect to it.",
)
BOTH_BIND: Final = problem(
    "both_bind",
    "{at}.bind",
    "a publisher listens at {endpoint} already: the engine binds, and so does kvbus",
    "set bind: false, or give the engine a concrete host in its endpoint",
    "One side has to connect to the port. Here both bind it.",
)
NO_ENGINE_DIALLED_IN: Final = problem(
    "no_engine_dialled_in",
    "{at}.bind",
    "no engine has dialled in at {endpoint}",
    "give the engine this endpoint with a concrete host; if it binds (tcp://*), set bind: false",
    "kvbus listens, and no engine has connected.",
)
ENGINE_PORT_TAKEN: Final = problem(
    "engine_port_taken",
    "{at}.bind",
    "{endpoint} is in use{detail}",
    "choose another port; if the engine binds this one, set bind: false",
    "kvbus is to listen here (bind: true), and another ZeroMQ socket does.",
)
CANNOT_LISTEN: Final = problem(
    "cannot_listen",
    "{at}.{name}",
    "kvbus cannot listen on {endpoint}: {why}",
    'choose a free port, and an address of this machine or "*"',
    "The operating system refuses the address or the port.",
)
NO_PUBLISHER_DIALLED_IN: Final = problem(
    "no_publisher_dialled_in",
    "{at}.endpoint",
    "a {type} socket has dialled in at {endpoint}; expected a publisher (PUB)",
    "correct the endpoint of the process that dials",
    "A process that is no engine connects to the engine's port.",
)

# -- ranks

RANKS_MISSING: Final = problem(
    "ranks_missing",
    "{at}.data_parallel_size",
    "rank {ranks} of {size} is missing: nothing listens at {endpoint}, while {there} answer",
    "set it to {there} if the engine has no more ranks, or start the rest",
    "More ranks are configured than the engine has, or some of them are down.",
)
MORE_RANKS_PERHAPS: Final = note(
    "more_ranks_perhaps",
    "{at}.data_parallel_size",
    "a publisher that no source names answers at {endpoint}, the port after the last rank's",
    "if it is this engine's, raise data_parallel_size above {rank}",
    "The engine may have more ranks than configured, or the port is another engine's.",
)
RANK_SHIFTED: Final = problem(
    "rank_shifted",
    "{at}.endpoint",
    "rank {theirs} publishes at {endpoint}, the port of rank {ours}",
    "name the port of rank 0; rank r is at port + r",
    "The ports begin at another rank's, so routers file blocks under the wrong rank.",
)
RANK_OUT_OF_RANGE: Final = problem(
    "rank_out_of_range",
    "{at}.data_parallel_size",
    "a batch names rank {rank}, and there are {size} ranks",
    "set the number of ranks that the engine has",
    "The engine has more ranks than configured.",
)

# -- the replay and the snapshots of an engine

REPLAY_NOT_ROUTER: Final = problem(
    "replay_not_router",
    "{at}.replay_endpoint",
    "{endpoint} {what} and answers no replay",
    "name the engine's replay port",
    "Missing batches cannot be recovered.",
)
REPLAY_SILENT: Final = problem(
    "replay_silent",
    "{at}.replay_endpoint",
    "the replay at {endpoint} does not answer",
    "name the replay port of this engine and rank; if it is that, its process stands still",
    "Until the replay answers, missing batches cannot be recovered.",
)
REPLAY_OF_ANOTHER: Final = problem(
    "replay_of_another",
    "{at}.replay_endpoint",
    "the replay at {replay} answers with other batches than {endpoint} publishes",
    "name the replay port of the same engine and rank",
    "The replay belongs to another engine or rank. What it brings is wrong.",
)
REPLAY_EMPTY: Final = problem(
    "replay_empty",
    "{at}.replay_endpoint",
    "the replay at {replay} has none of the batches that {endpoint} publishes",
    "name the replay port of the same engine and rank, and give it buffer_steps",
    "Missing batches cannot be recovered.",
)
REPLAY_ALONE: Final = problem(
    "replay_alone",
    "{at}.endpoint",
    "batches arrive late, by the replay only, and none arrives live: is endpoint the event port of the engine that "
    "replay_endpoint belongs to?",
    "set endpoint to the event port of the engine that replay_endpoint belongs to",
    "Routers learn of blocks seconds late.",
)
REPLAY_TOO_LONG: Final = problem(
    "replay_too_long",
    "outputs[].curve_client_keys",
    "a router of output {outputs} lacks blocks: its replay from 0 needs more than {limit:,} empty batches, the router "
    "refuses a shorter answer, and kvbus cannot tell which router at its address has asked",
    "give each router a CURVE key (curve_client_keys) or an output of its own, and restart the routers",
    "An llm-d router does not have the whole state.",
)
REQUEST_WAITS: Final = note(
    "request_waits",
    "{at}.replay_endpoint",
    "a request to the engine waits in kvbus, because file descriptors are short",
    "nothing: it is sent in its turn; with a higher limit (ulimit -n) more requests go at a time",
    "It passes by itself. Nothing counts as lost meanwhile.",
)

# -- messages of an engine

CONFLICT: Final = problem(
    "conflict",
    "{at}.endpoint",
    "several publishers send on one endpoint, {endpoint}: kvbus accepts no batch until only one of them is left",
    "give each engine and each rank a source and an address of its own, and no Service or proxy before several",
    "Nothing on the wire tells the batches of two publishers apart. Routers hold no block of the source.",
)
TOPIC: Final = problem(
    "topic",
    "{at}.topic",
    "no live batch comes under topic {prefix}: the engine publishes under {elsewhere}",
    "name the topic that the engine publishes under, or leave it empty",
    "kvbus admits no live batch. At most the replay brings batches, late.",
)
OTHER_TOPIC: Final = problem(
    "other_topic",
    "{at}.topic",
    "the engine publishes several streams: topic {own} is read, and batches under {second} are refused",
    "give each topic of that endpoint a source of its own, with its whole name as topic",
    "Routers do not learn of the other topic's blocks.",
)
TOPIC_UNKNOWN: Final = problem(
    "topic_unknown",
    "{at}.topic",
    "the socket has several topics, and replay answers name none: kvbus takes nothing from them",
    "give each topic of that endpoint a source of its own, with its whole name as topic",
    "Missing batches are lost.",
)
NOT_EVENTS: Final = problem(
    "not_events",
    "{at}.endpoint",
    "events or batches refused ({count:,}): {why}",
    "name an engine's event port; kvbus record saves the stream",
    "The port may be no engine's event port.",
)
EVENTS_REFUSED: Final = problem(
    "events_refused",
    "{at}.endpoint",
    "events refused ({count:,}): {why}",
    "look the reason up in docs/PROTOCOL.md; kvbus record saves the stream for a report",
    "Routers do not learn what these events say of the cache.",
)
FRAME_TOO_LARGE: Final = problem(
    "frame_too_large",
    "limits.max_frame_bytes",
    "a frame of {endpoint} is larger than limits.max_frame_bytes",
    "raise limits.max_frame_bytes, if the engine is right",
    "Batches of this size are lost.",
)
BATCH_TOO_LARGE: Final = problem(
    "batch_too_large",
    "limits.max_events",
    "batches of {endpoint} hold more events than limits.max_events",
    "raise limits.max_events, if the engine is right",
    "Batches of this size are refused whole.",
)
BLOCK_SIZE: Final = problem(
    "block_size",
    "block_size",
    "events refused ({count:,}): block_size is {size}, and the engine has blocks{own}",
    "set it to the engine's, or to auto",
    "Routers do not learn of the refused blocks.",
)
BLOCK_SIZE_TOO_LARGE: Final = problem(
    "block_size_too_large",
    "block_size",
    "every block is left out: block_size is {size}, and the engine's blocks are smaller",
    "set it to the engine's, or to auto",
    "Routers get no block.",
)
NO_PREFIX: Final = problem(
    "no_prefix",
    "groups",
    "no group of this model carries prefixes (sliding window, chunked local, mamba): routers get no block",
    "groups: all, if the routers can use such blocks",
    "kvbus passes only blocks that carry prefixes, and this model has none.",
)
REANNOUNCED: Final = problem(
    "reannounced",
    "duplicates",
    "{stores:,} stores announced whole prefixes that were live, and one block counts {copies:,} copies",
    "duplicates: ignore, if requests set kv_cache_report_mode=full",
    "If so, blocks that the engine has evicted stay live at routers.",
)
NO_STORES: Final = problem(
    "no_stores",
    "{at}.endpoint",
    "batches of {endpoint} hold no stores, its history included",
    "prefix caching must be on in the engine",
    "Routers get no block.",
)
NO_EVENTS: Final = problem(
    "no_events",
    "{at}.endpoint",
    "the engine at {endpoint} has published nothing so far: its replay is empty",
    "prefix caching and KV-cache events must be on in the engine; then send it a new, long prompt",
    "Routers get no block.",
)
ENGINE_IDLE: Final = note(
    "engine_idle",
    "{at}.endpoint",
    "nothing has come from {endpoint} so far: the engine is idle, or publishes no events",
    "send it a new, long prompt; --history looks at what it has sent before",
    "An engine without requests is silent.",
)
CLOCK_OFF: Final = note(
    "clock_off",
    "{at}.endpoint",
    "the clock of the engine at {endpoint} is {seconds:,.0f} s {which}, or its batches come late",
    "set the clocks of both machines (NTP)",
    "Times of events are wrong. Routing is not.",
)
SEVERAL_ADDRESSES: Final = note(
    "several_addresses",
    "{at}.endpoint",
    "the name in {endpoint} means {count} addresses, and kvbus follows one of them",
    "name each engine by an address of its own, or use discover.dns",
    "Engines at the other addresses are not followed.",
)
HASHES_DIFFER: Final = note(
    "hashes_differ",
    "sources",
    "{one} and {other} have different hashes for the same prompts: PYTHONHASHSEED is unset, or not the same",
    "set it to one value in all engines, if the router compares hashes of several workers",
    "A router that looks up one worker's hashes at another finds nothing.",
)
API_UNUSABLE: Final = problem(
    "api_unusable",
    "{at}.api",
    "the engine's API at {api} does not say whether the engine sleeps ({why})",
    "correct it; leave it out for an engine that is not vLLM",
    "kvbus cannot see that the engine sleeps.",
)
ENGINE_RESTARTED: Final = note(
    "engine_restarted",
    "{at}.endpoint",
    "engine restarted, {blocks:,} blocks cleared, epoch {before} → {epoch}",
    "nothing; if it happens often, the engine's log says why",
    "The engine's cache is empty. Routers were cleared of its blocks.",
)

# -- data that a partial source lacks

HISTORY_TRIMMED: Final = problem(
    "history_trimmed",
    "{at}.replay_endpoint",
    "partial: {what} trimmed from the engine's replay buffer before kvbus asked for {them}",
    "ends when {ends}; start kvbus before the engine, or raise the engine's buffer_steps",
    "The engine holds blocks that routers do not know of.",
)
HISTORY_UNANSWERED: Final = problem(
    "history_unanswered",
    "{at}.replay_endpoint",
    "partial: {what} has not answered a replay request so far",
    "ends when the engine answers one (it is asked again), or when {ends}",
    "The engine may hold blocks that routers do not know of.",
)
BATCHES_LOST: Final = problem(
    "batches_lost",
    "{at}.replay_endpoint",
    "partial: {what} lost for good{where}",
    "ends when {ends}; a larger buffer_steps of the engine makes losses rarer",
    "The engine holds blocks that routers do not know of.",
)
NO_REPLAY: Final = problem(
    "no_replay",
    "{at}.replay_endpoint",
    "partial: {what} sent while kvbus was not connected, and there is no replay_endpoint",
    "give the engine and the source a replay_endpoint; ends when {ends}",
    "The engine may hold blocks that routers do not know of.",
)
INDEX_FULL: Final = problem(
    "index_full",
    "limits.max_blocks",
    "partial: the index is full: kvbus refuses blocks beyond limits.max_blocks ({blocks:,}), limits.max_index_bytes "
    "({size:,}) or limits.max_groups ({groups:,})",
    "raise the limit that is reached; ends when {ends}",
    "Routers do not learn of further blocks.",
)
TOKENLESS: Final = problem(
    "tokenless",
    "{at}.endpoint",
    "partial: blocks were stored without tokens, and are known nowhere else: no router gets them",
    "ends when {ends}",
    "The engine holds blocks that routers do not know of.",
)
STORES_REFUSED: Final = problem(
    "stores_refused",
    "{at}.endpoint",
    "partial: the blocks of refused stores are missing (reason {reasons}, see docs/PROTOCOL.md)",
    "ends when {ends}",
    "The engine holds blocks that routers do not know of.",
)
HASHES_ALONE: Final = problem(
    "hashes_alone",
    "{at}.endpoint",
    "partial: the engine does not say the tokens of some blocks (masked ones of a sliding window, or offloaded ones): "
    "routers that hash tokens do not get these",
    "ends when {ends}",
    "Routers that hash tokens do not know of these blocks.",
)
TIER_UNKNOWN: Final = problem(
    "tier_unknown",
    "{at}.endpoint",
    "partial: a tier that came up after a reset of the cache may hold more than was announced",
    "ends when {ends}",
    "The engine may hold blocks that routers do not know of.",
)
