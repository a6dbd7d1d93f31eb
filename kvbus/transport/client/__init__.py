"""The reading side's sockets for the client library and the command line: one stream and its replay.

In: endpoints. Out: frames and what became of connections. It may use ``transport.sockets`` and the core's ``wire``.
"""
