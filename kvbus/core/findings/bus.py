"""The kinds of findings about kvbus itself: about its outputs, its routers and its machine.

Each kind is a row of the catalogue of findings (:mod:`kvbus.core.findings`).
"""

from __future__ import annotations

from typing import Final

from kvbus.core.findings.finding import note, problem

# -- outputs and routers

LISTENS_ELSEWHERE: Final = problem(
    "listens_elsewhere",
    "{at}.{name}",
    "kvbus runs, but nothing listens at {endpoint}",
    "the running kvbus has another configuration: restart it",
    "Routers that connect to this port of the output reach no process.",
)
PORT_TAKEN: Final = problem(
    "port_taken",
    "{at}.{name}",
    "{endpoint} is in use by {who}",
    "stop that process, or choose another port",
    "kvbus cannot start.",
)
OUR_REPLAY_SILENT: Final = problem(
    "our_replay_silent",
    "{at}.replay_endpoint",
    "kvbus's own replay at {endpoint} does not answer",
    "read kvbus's log",
)
NO_ROUTER_LISTENS: Final = problem(
    "no_router_listens",
    "{at}.bind",
    "no router listens at {endpoint}: perhaps the router does not bind its port, but connects to kvbus",
    "start the router, correct the port, or set bind: true if the router connects to kvbus",
    "With bind: false, kvbus connects to the router.",
)
NOT_A_SUBSCRIBER: Final = problem(
    "not_a_subscriber",
    "{at}.endpoint",
    "{endpoint} is a {type} socket; expected a subscriber (SUB)",
    "set endpoint to the port that the router binds",
)
ROUTER_TOPIC: Final = problem(
    "router_topic",
    "{at}.topic",
    "{who} subscribes to {topics}, but the stream's topic is {topic}: the router gets nothing",
    "set the output's topic to the topic that this router subscribes to, and its profile to this router's",
)
ROUTER_STALLED: Final = problem(
    "router_stalled",
    "{at}.send_hwm",
    "{who} reads nothing and was cut off from the live stream; {dropped:,} batches did not reach it",
    "find out why the router hangs; kvbus sends it the state again once it reads",
    "The router's view of the cache is out of date until the router reads again.",
)
ROUTER_BEHIND: Final = problem(
    "router_behind",
    "{at}.send_hwm",
    "{who} lags: its oldest unread batch is {seconds:,.0f} s old",
    "give the router more CPU, or check the network between kvbus and the router",
    "The router chooses engines by an old view of their caches.",
)
ROUTER_LOST_BATCHES: Final = note(
    "router_lost_batches",
    "{at}.send_hwm",
    "{who} was cut off from the live stream and lost {dropped:,} batches; {since}",
    "give the router more CPU; if it loses batches only in bursts, raise send_hwm",
    "The router read more slowly than the engine published.",
)
ROUTER_MISREADS: Final = problem(
    "router_misreads",
    "{at}.profile",
    "{router} misreads what this output sends: it needs {needs}",
    "set profile: {router}",
    "The router reads every batch and ignores some of its events. It does not report this to kvbus.",
)
OUTPUT_NOT_PROBED: Final = note(
    "output_not_probed",
    "{at}.type",
    "output {output} was not tested: doctor has no test for outputs of type {type}",
    "read kvbus's log, and the list of routers at /routers",
)
LOG_AWAY: Final = problem(
    "log_away",
    "{at}.{name}",
    "kvbus cannot use the log at {where}: {why}",
    "{do}",
    "kvbus writes nothing to the log, so readers of the log get no new batches.",
)

# -- kvbus and its machine

NO_ENGINE_FOUND: Final = problem(
    "no_engine_found",
    "{at}",
    "no engine is found: {where}",
    "start an engine, or correct the settings of discover",
    "Routers get no block, because kvbus reads no engine.",
)
DISCOVERY_FAILS: Final = problem(
    "discovery_fails",
    "{at}",
    "the discovery {name} gets no list of engines: {why}",
    "correct the settings under discover, or repair the service that they name; kvbus keeps asking",
    "kvbus does not find new engines.",
)
ENGINE_INVALID: Final = problem(
    "engine_invalid",
    "{at}",
    "the discovery {name} finds {engine} with an invalid value: {problem}{more}",
    "correct the value where the discovery reads it",
    "Routers get no block of an engine or rank whose entry is invalid. An engine that was found before stays a source "
    "at its former address. At most 20 engines of a discovery have a finding each; `kvbus_discovery_left_out` with the "
    "reason `invalid` counts all.",
)
ENGINE_LEFT_OUT: Final = problem(
    "engine_left_out",
    "{at}",
    "kvbus does not read {count:,} of the discovered engines (reason {reason})",
    "{do}; one of the left-out engines is {engine}",
    "Routers get no block of an engine that kvbus leaves out.",
)
LOG_OTHER_SCHEMA: Final = problem(
    "log_other_schema",
    "{at}",
    "the log that the discovery {name} reads has {count:,} records of a schema that this version does not read",
    "upgrade this kvbus; in a later upgrade, upgrade readers of the log before its writers",
    "Routers get no block of the streams that these records belong to.",
)
RELOAD_REFUSED: Final = problem(
    "reload_refused",
    "{key}",
    "kvbus does not use {what} on disk: {why}",
    "{do}",
    "kvbus keeps what it has read before. The next start reads the files on disk, and may fail.",
)
STATE_NOT_WRITTEN: Final = problem(
    "state_not_written",
    "state_dir",
    "kvbus cannot write its state to {where}: {why}",
    "free disk space for state_dir or correct its permissions; kvbus tries again every minute",
    "kvbus continues to relay events, but a restart of kvbus loses the state.",
)
STATE_DIR_NOT_FOUND: Final = note(
    "state_dir_not_found",
    "state_dir",
    "state_dir auto finds no directory ({why}): a restart loses the state",
    "set state_dir to a directory",
    "After a restart of kvbus, routers get only the blocks that the engines' replays still have.",
)
STATE_DIR_OPEN: Final = problem(
    "state_dir_open",
    "state_dir",
    "other users may read state_dir {path} (mode {mode:04o}), and its files hold token ids",
    "chmod o= {path}",
    "Token ids can be decoded into the text of prompts.",
)
FILE_UNUSABLE: Final = problem(
    "file_unusable",
    "{key}",
    "{key} {value}: {why}",
    "correct the path, or the permissions of the file",
    "kvbus cannot start until it can use this file or directory.",
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
    "choose another address for http, or stop the process that uses it",
    "kvbus cannot start.",
)
NO_BUS: Final = problem(
    "no_bus",
    "http",
    "{what}",
    "give doctor the address of a running bus: http://HOST:9477",
    "doctor asks the running kvbus over HTTP for its state, and gets no answer that it can use.",
)
OTHER_CONFIGURATION: Final = problem(
    "other_configuration",
    "sources",
    "the bus at {url} runs another configuration than doctor has read: it reads {theirs}",
    "restart the bus, or set another http address in this configuration",
)
