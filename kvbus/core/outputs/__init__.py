"""Numbered streams, the journal that replays them, and answers to routers that missed more than the journal keeps.

The input is encoded batches and requests of routers. The output is seqs, and answers message by message. A seq never
goes back, and a batch is in the journal before it is sent. The package may use all of the core except the relay.
"""
