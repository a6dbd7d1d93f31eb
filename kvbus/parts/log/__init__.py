"""Streams in a log that outlives the bus: the format of its records, what a log has to do, and how one is read back.

Nothing here knows a server but ``kafka*``, ``nats*`` and ``redis*``, which need the extras of these names.
"""
