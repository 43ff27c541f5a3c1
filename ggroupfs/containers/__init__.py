"""Containers: the files and the hook that give a container the library, the socket and limits of its own."""
