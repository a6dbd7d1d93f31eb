"""The sockets of a reader, for the client library and the command line: one stream and its replay.

In: endpoints. Out: frames, and connections made and lost. It may use ``transport.sockets`` and the core's ``wire``.
"""
