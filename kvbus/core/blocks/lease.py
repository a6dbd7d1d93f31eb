"""What shows that a frozen copy is still read: compiled objects, which tables are, have no weak references."""

from __future__ import annotations


class Lease:
    """Exists as long as somebody holds it."""

    __slots__ = ("__weakref__",)
