"""Streams in a log that outlives kvbus: the format of records, the contract of a log, and how a stream is read back.

Only ``kafka*``, ``nats*`` and ``redis*`` depend on a server. They need the extras of these names.
"""
