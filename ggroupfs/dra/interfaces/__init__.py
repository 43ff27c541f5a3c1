"""The kubelet's interfaces in protocol buffers: their published messages, and the modules that protoc made from them.

`make interfaces` rebuilds the modules from the .proto files. Services are left out: one implementation answers for
every version of an interface (:mod:`ggroupfs.dra.plugin`).
"""
