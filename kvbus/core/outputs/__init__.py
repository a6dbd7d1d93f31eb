"""Outputs: numbered streams, the journal that replays them, and answers to those who missed more.

In: encoded batches and requests of routers. Out: seqs, answers message by message.
A seq never goes back, and what is sent under it is in the journal first. It may use all of the core below the relay.
"""
