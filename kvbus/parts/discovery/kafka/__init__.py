"""Streams in Kafka, read for routers: what outputs of ``type: kafka`` have written.

In: a topic. Out: a source for each stream, with its batches. The package is a part, with the extra ``kafka``.
"""
