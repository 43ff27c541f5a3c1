"""The filesystem: what answers the requests of FUSE, from the operation to the file."""
