"""The sockets that read an engine's or a kvbus's stream and its replay, for the client library and the command line.

In: endpoints. Out: frames, and connections that were made or lost. The package may use ``transport.sockets`` and the
core's ``wire``.
"""
