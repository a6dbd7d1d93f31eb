"""The catalogue, about this kvbus: its outputs, its routers and its machine."""

from __future__ import annotations

from typing import Final

from kvbus.core.findings.finding import note, problem

# -- outputs and routers

LISTENS_ELSEWHERE: Final = problem(
    "listens_elsewhere",
    "{at}.{name}",
    "a bus runs, and nothing listens at {endpoint}",
    "the running bus has another configuration: restart it",
    "Routers that connect to this port reach no process.",
)
PORT_TAKEN: Final = problem(
    "port_taken",
    "{at}.{name}",
    "{endpoint} is in use by {who}",
    "stop it, or choose another port",
    "kvbus cannot start.",
)
OUR_REPLAY_SILENT: Final = problem(
    "our_replay_silent",
    "{at}.replay_endpoint",
    "the replay at {endpoint} does not answer",
    "look at kvbus's log",
    "Routers that ask for the state get nothing.",
)
NO_ROUTER_LISTENS: Final = problem(
    "no_router_listens",
    "{at}.bind",
    "no router listens at {endpoint}: if the router dials kvbus, both ends dial",
    "start the router, correct the port, or set bind: true if the router dials",
    "kvbus connects to the router (bind: false), and no process accepts.",
)
NOT_A_SUBSCRIBER: Final = problem(
    "not_a_subscriber",
    "{at}.endpoint",
    "{endpoint} is a {type} socket; expected a subscriber (SUB)",
    "name the port that the router binds",
    "kvbus dials a port that takes no events.",
)
ROUTER_TOPIC: Final = problem(
    "router_topic",
    "{at}.topic",
    "{who} subscribes to {topics}, and the stream's topic is {topic}: it gets nothing",
    "give the output the topic that this router reads, and its profile",
    "The router knows no block.",
)
ROUTER_STALLED: Final = problem(
    "router_stalled",
    "{at}.send_hwm",
    "{who} reads nothing and was cut off from the live stream; {dropped:,} batches did not reach it",
    "find out why it stands still; it gets the state again once it reads",
    "The router's view is out of date until it reads again.",
)
ROUTER_BEHIND: Final = problem(
    "router_behind",
    "{at}.send_hwm",
    "{who} lags: its oldest unread batch is {seconds:,.0f} s old",
    "give the router CPU, or look at the network to it",
    "The router decides by an old view.",
)
ROUTER_LOST_BATCHES: Final = note(
    "router_lost_batches",
    "{at}.send_hwm",
    "{who} was cut off and lost {dropped:,} batches; {since}",
    "give the router CPU; for bursts raise send_hwm",
    "The router read too slowly for a while.",
)
ROUTER_MISREADS: Final = problem(
    "router_misreads",
    "{at}.profile",
    "{router} misreads what this output sends: it needs {needs}",
    "set profile: {router}",
    "The router reads every batch and drops events of it, without a word to kvbus.",
)
OUTPUT_NOT_PROBED: Final = note(
    "output_not_probed",
    "{at}.type",
    "output {output} was not looked at: doctor has no probe for type {type}",
    "look at kvbus's log and at /routers",
    "doctor says nothing about this output.",
)
LOG_AWAY: Final = problem(
    "log_away",
    "{at}.{name}",
    "the log at {where} is away: {why}",
    "{do}",
    "Nothing is written to the log, and its readers hear nothing new.",
)

# -- kvbus and its machine

NO_ENGINE_FOUND: Final = problem(
    "no_engine_found",
    "{at}",
    "no engine is found: {where}",
    "start an engine, or correct where kvbus searches",
    "Routers get no block.",
)
DISCOVERY_FAILS: Final = problem(
    "discovery_fails",
    "{at}",
    "{name} cannot be asked for engines: {why}",
    "correct it; kvbus itself asks again and again",
    "New engines are not found.",
)
ENGINE_LEFT_OUT: Final = problem(
    "engine_left_out",
    "{at}",
    "engines found and left out ({count:,}): {reason}",
    "{do}; one of them is {engine}",
    "Routers know nothing of these engines.",
)
LOG_OTHER_SCHEMA: Final = problem(
    "log_other_schema",
    "{at}",
    "{name} has {count:,} records of a schema that this version does not read",
    "upgrade this kvbus: readers first, and then writers",
    "Routers know nothing of the streams that these records belong to.",
)
STATE_NOT_WRITTEN: Final = problem(
    "state_not_written",
    "state_dir",
    "kvbus cannot write its state to {where}: {why}",
    "make room in state_dir or correct its permissions; kvbus tries again every minute",
    "Relaying goes on. A restart loses the state.",
)
STATE_DIR_NOT_FOUND: Final = note(
    "state_dir_not_found",
    "state_dir",
    "state_dir auto finds no directory ({why}): a restart loses the state",
    "name a directory",
    "After a restart routers get blocks only from the engines' replays.",
)
STATE_DIR_OPEN: Final = problem(
    "state_dir_open",
    "state_dir",
    "others may read state_dir {path} (mode {mode:04o}), and it holds token ids",
    "chmod o= {path}",
    "Token ids are prompts.",
)
FILE_UNUSABLE: Final = problem(
    "file_unusable",
    "{key}",
    "{key} {value}: {why}",
    "correct it or its permissions",
    "kvbus does not start with this file.",
)
LIBZMQ_TOO_OLD: Final = problem(
    "libzmq_too_old",
    "libzmq",
    "{why}",
    "pip install --upgrade pyzmq",
    "kvbus does not start.",
)
HTTP_TAKEN: Final = problem(
    "http_taken",
    "http",
    "{what}",
    "choose another address for http, or stop what is there",
    "kvbus cannot start.",
)
NO_BUS: Final = problem(
    "no_bus",
    "http",
    "{what}",
    "name the address of a running bus, http://HOST:9477",
    "doctor cannot ask the bus.",
)
OTHER_CONFIGURATION: Final = problem(
    "other_configuration",
    "sources",
    "the bus at {url} runs another configuration: it follows {theirs}",
    "restart it, or give this one another http",
    "What doctor probes is not what runs.",
)
