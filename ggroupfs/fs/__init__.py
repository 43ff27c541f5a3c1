"""The filesystem: answers the requests of FUSE, from the operation down to the file."""
