"""Put one publisher's batches in order, deliver each exactly once, and determine the epoch of each batch.

The input is numbered live batches, replay answers, connections, disconnections, and the time. The output is actions:
deliver this batch, a new epoch has begun, these batches are lost, request a replay. The package never decodes a
payload. It compares the content of batches by fingerprint. Of the other core modules, it may import ``stats`` and
``types``.
"""
