"""Streams in Redis or Valkey, read for routers: what outputs of ``type: redis`` have written.

In: the streams of one prefix. Out: a source for each stream, with its batches. The package is a part, with the extra
``redis``.
"""
