"""``type: kafka``: streams in a topic of Kafka; see :mod:`kvbus.parts.outputs.log_output`.

The package is a part: without its folder, and without the extra ``kafka``, the rest is as it was.
"""
