"""What opendir(3) and readdir(3) find: names and their attributes, kept until anything else is in the tree.

A listing of a thousand processes is made of objects that nobody needs twice, and a look round the tree (`ls`, `find`,
`ggroupfs top`) comes every few seconds, to a tree that seldom changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs
import pyfuse3

from ggroupfs.fs.inodes import Attributes
from ggroupfs.fs.tree import Tree

KEPT = 64
"""Listings that are kept. One of 10,000 processes takes 3 MB; others are of some twenty names."""


@attrs.frozen(eq=False)
class Listing:
    """The names in a directory when it was opened."""

    version: object
    """Of the tree when it was made: until that is another, it is true."""
    names: list[bytes]
    """In the order in which they are told."""
    inodes: list[int]
    """Of each name."""
    entries: list[pyfuse3.EntryAttributes | None]
    """What stat(2) shows of each; None where it was not told yet."""


class Directories:
    """See the module."""

    def __init__(self, tree: Tree, entry: Callable[[Attributes], pyfuse3.EntryAttributes]) -> None:
        """`entry` makes attributes of the tree what the kernel is told."""
        self._tree = tree
        self._entry = entry
        self._version: object = None
        self._kept: dict[int, Listing] = {}

    def open(self, inode: int) -> Listing:
        """What is in a directory now. ENOENT when it is gone."""
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
        """Tells the names from place `start` on, each with the place of the next, until `tell` has no more room. Those
        that are gone since are left out. Returns the inodes of what was told."""
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
