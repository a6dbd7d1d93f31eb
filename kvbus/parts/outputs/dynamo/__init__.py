"""Outputs on Dynamo's event plane, for an unmodified Dynamo frontend with a KvRouter.

The driver receives numbered batches of one rank each, in kvbus's encoding. It sends RouterEvents over ZMQ, and writes
records into Dynamo's discovery, where the frontend finds it. It needs the extra ``dynamo`` (xxhash). It may use
``config``, ``core`` and ``transport``.
"""
