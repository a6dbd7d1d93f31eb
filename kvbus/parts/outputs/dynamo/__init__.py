"""The driver of outputs on Dynamo's event plane, which an unmodified Dynamo frontend with a KvRouter can read.

The driver receives numbered batches in kvbus's encoding, each of one rank. It sends them as RouterEvents over ZeroMQ.
It also writes records into Dynamo's discovery, so that the frontend finds the streams. The extra ``dynamo`` (xxhash) is
required. The driver may import ``config``, ``core`` and ``transport``.
"""
