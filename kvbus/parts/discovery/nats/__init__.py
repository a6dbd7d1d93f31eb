"""Streams in NATS JetStream, read for routers: what outputs of ``type: nats`` have written.

In: a stream of JetStream. Out: a source for each stream, with its batches. The package is a part, with the extra
``nats``.
"""
