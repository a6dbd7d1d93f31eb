"""kvbus in front of an engine's gRPC API.

In: the calls of routers and of workers beside the engine. Out: where kvbus has the engine's events, to those who ask
the engine where its events are; everything else goes to the engine and back as it came, unread.
"""

import os

# it is read once, when gRPC is imported: what its core would write to stderr is no line of kvbus's log
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
