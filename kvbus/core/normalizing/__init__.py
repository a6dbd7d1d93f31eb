"""Normalizing: from what an engine announced to what routers may rely on.

In: the decoded events of one batch. Out: events of fixed-size blocks, parents first, each stored and removed once.
Validation, copies, block sizes and order within a batch are decided here; nobody else changes the index.
It may use ``blocks``, ``wire``, ``stats`` and ``types``.
"""
