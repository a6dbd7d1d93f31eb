"""Outputs on Dynamo's event plane: what an unmodified frontend with a KvRouter reads, found by its own discovery.

In: numbered batches of one rank each, in kvbus's encoding. Out: RouterEvents over ZMQ, and records in Dynamo's
discovery. It needs the extra ``dynamo`` (xxhash). May use: ``config``, ``core`` and ``transport``.
"""
