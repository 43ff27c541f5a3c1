"""The kubelet's interfaces in protocol buffers: their messages, as it publishes them, and what protoc made of them.

`make interfaces` makes the modules anew from the .proto files. Services are no part of them: one implementation answers
for every version of an interface (:mod:`ggroupfs.dra.plugin`).
"""
