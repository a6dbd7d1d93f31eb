"""Put one publisher's batches in order, each exactly once, in the epoch they belong to.

The input is numbered live batches and replay answers, connections and disconnections, and the time. The output is
actions: deliver this batch, a new epoch has begun, these batches are lost, ask for a replay. The package never decodes
a payload: it compares content by fingerprint. It may use ``stats`` and ``types``.
"""
