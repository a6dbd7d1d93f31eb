"""``type: redis``: streams in Redis or Valkey; see :mod:`kvbus.parts.outputs.log_output`.

The package is a part: without its folder, and without the extra ``redis``, the rest is as it was.
"""
