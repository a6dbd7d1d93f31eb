"""kvbus as a proxy of an engine's gRPC API.

Routers and workers beside the engine send their calls to kvbus. If a call asks where the engine's events are, kvbus
answers with its own endpoints. kvbus forwards every other call and its answer as bytes, without decoding the messages.
"""

import os

# gRPC reads this variable once, on import. Its core would write lines to stderr that are not in kvbus's log format.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
