"""The wire: multipart frames, MessagePack payloads, and what families of routers want written.

In: frames and payloads as they were received. Out: messages, canonical events and batches, and bytes again.
It knows every dialect and every profile, and no state. It may use ``types`` and nothing else of the core.
"""
