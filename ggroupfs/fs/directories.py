"""The listings that opendir(3) and readdir(3) return: names and attributes, cached until anything in the tree changes.

A listing of a thousand processes creates many objects that are used once, and a walk over the tree (`ls`, `find`,
`ggroupfs top`) comes every few seconds, while the tree seldom changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs
import pyfuse3

from ggroupfs.fs.inodes import Attributes
from ggroupfs.fs.tree import Tree

KEPT = 64
"""Listings that are cached. One of 10,000 processes takes 3 MB; most have some twenty names."""


@attrs.frozen(eq=False)
class Listing:
    """The names in a directory when it was opened."""

    version: object
    """Version of the tree when the listing was made; it is valid while the tree has that version."""
    names: list[bytes]
    """Names, in the order in which they are listed."""
    inodes: list[int]
    """Inode number of each name."""
    entries: list[pyfuse3.EntryAttributes | None]
    """Attributes of each name, as stat(2) shows them; None until they are first needed."""


class Directories:
    """The listings of all directories, with the cache of them."""

    def __init__(self, tree: Tree, entry: Callable[[Attributes], pyfuse3.EntryAttributes]) -> None:
        """`entry` converts attributes of the tree to those of the kernel."""
        self._tree = tree
        self._entry = entry
        self._version: object = None
        self._kept: dict[int, Listing] = {}

    def open(self, inode: int) -> Listing:
        """Return the present listing of a directory. ENOENT if the directory is gone."""
        version = self._tree.version
        if version != self._version:
            self._kept.clear()
            self._version = version
        listing = self._kept.get(inode)
        if listing is None:
            found = list(self._tree.entries(inode))
            names, inodes = [os.fsencode(name) for name, _ in found], [inode for _, inode in found]
            listing = Listing(version, names, inodes, [None] * len(found))
            if len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[inode] = listing
        return listing

    def read(
        self, listing: Listing, start: int, tell: Callable[[bytes, pyfuse3.EntryAttributes, int], bool]
    ) -> list[int]:
        """Pass the names from index `start` on to `tell`, each with the index of the next, until `tell` is full.

        Names that have disappeared since opendir(3) are left out. Returns the inodes of the names passed.
        """
        if listing.version != self._tree.version:
            return self._read_anew(listing, start, tell)
        names, inodes, entries = listing.names, listing.inodes, listing.entries
        at = start
        for at in range(start, len(names)):
            entry = entries[at]
            if entry is None:
                entry = entries[at] = self._entry(self._tree.attributes(inodes[at]))
            if not tell(names[at], entry, at + 1):
                return inodes[start:at]
        return inodes[start:]

    def _read_anew(
        self, listing: Listing, start: int, tell: Callable[[bytes, pyfuse3.EntryAttributes, int], bool]
    ) -> list[int]:
        told: list[int] = []
        for at in range(start, len(listing.names)):
            inode = listing.inodes[at]
            try:
                attributes = self._tree.attributes(inode)
            except FileNotFoundError:
                continue  # gone since opendir
            if not tell(listing.names[at], self._entry(attributes), at + 1):
                break
            told.append(inode)
        return told
