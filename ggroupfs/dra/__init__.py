"""The DRA driver: what the scheduler of Kubernetes gives a pod of a GPU, held by the slice of the pod.

A claim is what a pod asks for, a share is one request of it on one GPU: so much memory, so much of the time. The
scheduler counts what is free by a ResourceSlice, the driver writes for each prepared claim a CDI specification, and the
hook in that sets limits before the container's program begins (docs/kubernetes.md).
"""

NAME = "gpu.ggroup.io"
"""Name of the driver, and vendor of its CDI devices."""
