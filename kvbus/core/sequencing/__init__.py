"""Sequencing: one publisher's batches in order, each once, in the epoch they belong to.

In: live batches and replay answers with their numbers, connections that come and go, the time.
Out: actions: deliver this batch, a new epoch has begun, so many are lost, ask for a replay.
It never decodes a payload: content is compared by fingerprint. It may use ``stats`` and ``types``.
"""
