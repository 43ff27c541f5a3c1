"""Containers: what a runtime reads and calls so that one has the library, the socket and limits of its own."""
