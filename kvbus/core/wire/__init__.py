"""Parse and build multipart frames and MessagePack payloads, in the form that each family of routers reads.

The input is received frames and payloads. The output is messages, canonical events and batches, and encoded bytes. The
package knows every dialect and every profile, and keeps no state. Of the core, it may use only ``types``.
"""
