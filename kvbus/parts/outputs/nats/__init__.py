"""``type: nats``: streams in NATS JetStream; see :mod:`kvbus.parts.outputs.log_output`.

The package is a part: without its folder, and without the extra ``nats``, the rest is as it was.
"""
